"""`mpiplus info` as a rank, but for one rank, which starts MPI and then talks to nobody.

Rank 0 has the last word, and with it ends the job: launchers kill all as soon as one rank has ended.
"""

from __future__ import annotations

import os
import sys
import time

RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
SILENT = "2"


def main() -> None:
    if RANK == SILENT:
        from mpi4py import MPI  # noqa: F401

        time.sleep(100)
        os._exit(0)
    from torchmpi_plugin.cli import main as mpiplus

    try:
        mpiplus(["info", *sys.argv[1:]])
    finally:
        if RANK != "0":
            time.sleep(100)


main()
