"""The process that dares to call MPI, for one that does not: MPI may hang, print, or end the process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from ...launchers import fit
from ...mpi import library as mpi_library
from ...node import node
from ...node.python import python_command
from . import group, library
from .pairs import Talk, failed_pairs

_GROUPS = "groups"
_WORK = "from torchmpi_plugin.cli.info.worker import main; main()"


def ask_mpi(seconds: float, pair_seconds: float, groups: bool) -> tuple[dict[str, Any], str]:
    """Call MPI in a process of its own, which under a launcher becomes this rank.

    Returns:
        What the process found out before it ended or had to be stopped, and why that was not everything; empty if
        it was.
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)
    command = python_command(_WORK, str(write), str(pair_seconds), *([_GROUPS] if groups else []))
    # Its prints must not get into the report; it must inherit PMI_FD.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, close_fds=False)
    os.close(write)
    lines, late = _listen(read, time.monotonic() + seconds)
    facts: dict[str, Any] = {}
    for line in lines:
        facts.update(json.loads(line))
    phase = facts.pop("phase", "the start")
    if late:
        child.kill()
    code = child.wait()
    if "error" in facts:
        return facts, str(facts.pop("error"))
    if late:
        return facts, f"{phase} has not come to an end within {seconds:g} s"
    if code:
        return facts, f"the process ended in {phase} ({'signal' if code < 0 else 'exit code'} {abs(code)})"
    return facts, ""


def _listen(read: int, until: float) -> tuple[list[str], bool]:
    """All lines up to the end of the pipe, or to the deadline."""
    data = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0]:
            break
        piece = os.read(read, 1 << 16)
        if not piece:
            os.close(read)
            return data.decode().splitlines(), False
        data += piece
    os.close(read)
    complete = data[: data.rfind(b"\n") + 1]
    return complete.decode().splitlines(), True


def main() -> None:
    """Call MPI, and write what comes of it, a JSON object on a line, to the descriptor that the command line names."""
    write, pair_seconds = int(sys.argv[1]), float(sys.argv[2])
    os.set_inheritable(write, False)

    def tell(**facts: Any) -> None:
        os.write(write, json.dumps(facts).encode() + b"\n")

    try:
        good = _call_mpi(tell, pair_seconds, _GROUPS in sys.argv)
    except Exception as error:
        tell(error=str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")
        os._exit(1)
    if not good:
        os._exit(0)  # not by way of MPI's own exit handlers, which would wait for ranks that cannot be reached


def _call_mpi(tell: Any, pair_seconds: float, groups: bool) -> bool:
    tell(phase="loading the MPI library")
    mpi = mpi_library.load()
    found = mpi_library.describe(mpi)
    tell(library=asdict(found))
    fit.check(found)
    tell(phase="MPI_Init")
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    tell(mpi=library.describe(mpi, found), rank=mpi.COMM_WORLD.Get_rank(), size=mpi.COMM_WORLD.Get_size())
    good = True
    if mpi.COMM_WORLD.Get_size() > 1:
        tell(phase="the exchange between all pairs of ranks")
        good = _meet(mpi, tell, pair_seconds, groups)
    tell(met=good)
    if good:
        tell(phase="MPI_Finalize")
        mpi.Finalize()
    return good


def _meet(module: Any, tell: Any, pair_seconds: float, groups: bool) -> bool:
    talk = Talk(module, pair_seconds)
    failed = talk.try_all()
    name = os.uname().nodename
    cpus = sorted(os.sched_getaffinity(0))
    about = {"host": name, "node": node.identity(), "cpus": cpus, "cores": node.cores(cpus), "all": os.cpu_count()}
    if groups:
        about |= group.own_report()
    reports = talk.gather({**about, "failed": {str(peer): why for peer, why in failed.items()}})
    if talk.rank == 0:
        bad = failed_pairs(reports, talk.size)
        tell(reports={str(rank): report for rank, report in reports.items()}, failed_pairs=bad)
        if groups and len(reports) == talk.size:
            tell(group=group.cost(module, reports))
        return talk.agree(not bad)
    return talk.agree(True)
