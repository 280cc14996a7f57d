"""Measures which lines and branches of the package run, in every Python process that comes to import it.

Stage tests has a .pth file import this at the start of each process of its environment. coverage's own .pth file would
measure from there on, and cost each rank half a second for torch's own import; and a process without the package pays
nothing here. The fork server's template imports coverage and the package once for all of its ranks.
"""

import os
import sys

PACKAGE = "torchmpi_plugin"
#: Of a job the rank that is measured, as that takes a third of a rank's time; the others mostly do the same.
RANK = "0"


def start():
    """Measure from now on, until this process ends or `stop` is called."""
    import coverage

    measured = coverage.Coverage(
        data_file=f"{folder}/data",
        data_suffix=True,  # a file for each process,
        auto_data=True,  # which it writes when it ends
        branch=True,
        source_pkgs=[PACKAGE],
        config_file=False,
        messages=False,
    )
    # Tests read what a process says on stderr.
    measured.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "module-not-measured"])
    measured.start()


def stop():
    """In a process that is about to fork others, of which each imports this again: write down what has run."""
    import atexit

    import coverage

    if measured := coverage.Coverage.current():
        measured.stop()
        measured.save()
        atexit.unregister(measured._atexit)


class FirstImport:
    """Finds no module, but knows when the package is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == PACKAGE:
            sys.meta_path.remove(self)
            start()


folder = os.environ.get("MPIPLUS_TEST_COVERAGE")
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or RANK
# What is on the PYTHONPATH is not the installed package: tests/faults has one of its own.
if folder and "PYTHONPATH" not in os.environ and rank == RANK:
    if PACKAGE in sys.modules:  # forked from a process that had it
        start()
    else:
        sys.meta_path.insert(0, FirstImport())
