"""`mpiplus info` as a rank, but for one rank, which starts MPI and then talks to nobody."""

from __future__ import annotations

import os
import sys
import time

SILENT = "2"


def main() -> None:
    if SILENT in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
        from mpi4py import MPI  # noqa: F401

        time.sleep(20)
        os._exit(0)
    from torchmpi_plugin.cli import main as mpiplus

    mpiplus(["info", *sys.argv[1:]])


main()
