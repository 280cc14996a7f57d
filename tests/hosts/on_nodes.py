#!/usr/bin/env python3
"""Run a command on pretended nodes of this machine, by MPI: network namespaces, perhaps behind a slow wire.

As root, with the Python of an environment that has this package and an MPI; its mpiexec starts the ranks:

    python tests/hosts/on_nodes.py --nodes 2 --ranks 1 --rate 1gbit mpiplus bench --train ddp
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi_installations import is_open_mpi
from network import hosts, launch, missing

BESIDE = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a command on pretended nodes of this machine, by MPI.")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="on each node (1)")
    parser.add_argument("--rate", default="", help="what a node can send, as tc writes it: 1gbit (as fast as memory)")
    parser.add_argument("--mpiexec", default=shutil.which("mpiexec", path=BESIDE), help="beside this Python")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="with its arguments")
    given = parser.parse_args()
    if given.command[:1] == ["--"]:
        del given.command[0]
    if not given.command or not given.mpiexec:
        parser.error("no command" if given.mpiexec else "no mpiexec")
    if reason := missing():
        parser.error(reason)
    return given


def environment() -> dict[str, str]:
    """One thread for each rank, and MPI over TCP only: MPICH's UCX would see one kernel and go through its memory."""
    usual = {"OMP_NUM_THREADS": "1", "OMPI_MCA_btl": "^ofi", "UCX_TLS": "tcp"}
    return {**usual, **os.environ, "PATH": BESIDE}


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the nodes
    program = shutil.which(given.command[0], path=BESIDE) or given.command[0]
    os.environ.update(environment())
    with tempfile.TemporaryDirectory() as folder, hosts(given.nodes, Path(folder), given.rate) as made:
        vendor = "Open MPI" if is_open_mpi(given.mpiexec) else "MPICH"
        command = launch(made, given.mpiexec, vendor, given.ranks, [program, *given.command[1:]])
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
