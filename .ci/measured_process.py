"""Measures which lines and branches of the package run, in every Python process that comes to import it.

Stage tests has a .pth file import this at the start of each process of its environment. coverage's own .pth file would
measure from there on, and cost each rank half a second for torch's own import; and a process without the package pays
nothing here.
"""

import os
import sys

#: What four and five ranks do, two and three have done.
RANKS = 3


class FirstImport:
    """Finds no module, but knows when the package is looked for."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name != "torchmpi_plugin":
            return
        sys.meta_path.remove(self)
        import coverage

        measured = coverage.Coverage(
            data_file=f"{self.folder}/data",
            data_suffix=True,  # a file for each process,
            auto_data=True,  # which it writes when it ends
            branch=True,
            source_pkgs=[name],
            config_file=False,
            messages=False,
        )
        # Tests read what a process says on stderr.
        measured.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "module-not-measured"])
        measured.start()


folder = os.environ.get("MPIPLUS_COVERAGE")
# What is on the PYTHONPATH is not the installed package: tests/faults has one of its own.
if folder and "PYTHONPATH" not in os.environ and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) <= RANKS:
    sys.meta_path.insert(0, FirstImport(folder))
