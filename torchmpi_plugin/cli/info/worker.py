"""The process that dares to call MPI, for one that does not: MPI may hang, print, or end the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from ...flavours import Library
from ...launchers import fit
from ...mpi import cuda_aware
from ...mpi import library as mpi_library
from ...node import node
from ...node.python import python_command
from . import group
from .pairs import Talk, failed_pairs

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_ABIS = {"openmpi": "Open MPI's", "mpich": "MPICH's", "mpiabi": "the MPI-5 standard's"}
_GROUPS = "groups"
_WORK = "from torchmpi_plugin.cli.info.worker import main; main()"


def ask_mpi(seconds: float, pair_seconds: float, groups: bool) -> tuple[dict[str, Any], str]:
    """Call MPI in a process of its own, which under a launcher becomes this rank.

    Returns:
        What the process found out before it ended or had to be stopped, and why that was not everything; empty if
        it was.
    """
    command, late = python_command(_WORK, str(pair_seconds), *([_GROUPS] if groups else [])), False
    # It must inherit PMI_FD.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, close_fds=False) as child:
        try:
            said, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            child.kill()
            said, late = error.output or b"", True
    code = child.returncode
    facts: dict[str, Any] = {}
    for line in said.splitlines(keepends=True):
        if line.startswith(b"{") and line.endswith(b"\n"):  # it is no print of Python's start, and was not cut off
            facts.update(json.loads(line))
    phase = facts.pop("phase", "the start")
    if "error" in facts:
        return facts, str(facts.pop("error"))
    if late:
        return facts, f"{phase} has not come to an end within {seconds:g} s"
    if code:
        return facts, f"the process ended in {phase} ({'signal' if code < 0 else 'exit code'} {abs(code)})"
    return facts, ""


def main() -> None:
    """Call MPI, and write what comes of it to stdout, a JSON object on a line; what MPI prints goes to stderr."""
    write, pair_seconds = os.dup(1), float(sys.argv[1])
    os.dup2(2, 1)

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
    tell(mpi=_initialised(mpi, found), rank=mpi.COMM_WORLD.Get_rank(), size=mpi.COMM_WORLD.Get_size())
    good = True
    if mpi.COMM_WORLD.Get_size() > 1:
        tell(phase="the exchange between all pairs of ranks")
        good = _meet(mpi, tell, pair_seconds, groups)
    tell(met=good)
    if good:
        tell(phase="MPI_Finalize")
        mpi.Finalize()
    return good


def _initialised(module: Any, library: Library) -> dict[str, Any]:
    """Return what an initialised ``mpi4py.MPI`` says besides."""
    levels = [getattr(module, f"THREAD_{name}") for name in _LEVELS]
    return {
        "vendor": library.vendor,
        "version": library.version,
        "text": library.headline,
        "standard": ".".join(map(str, module.Get_version())),
        "abi": f"{_ABIS[library.abi]} ({library.abi})" if library.abi else "that which mpi4py was built for",
        "path": library.path or "unknown",
        "thread_level": f"MPI_THREAD_{_LEVELS[levels.index(module.Query_thread())]}",
        "cuda": _cuda(module),
    }


def _cuda(module: Any) -> dict[str, Any]:
    """Return whether MPI takes CUDA buffers, how mpiplus therefore moves CUDA tensors, and why we think so."""
    support = cuda_aware.support_of(module, os.environ)
    try:
        direct, why = cuda_aware.path(support, *cuda_aware.asked_for(None, os.environ))
    except ValueError as error:
        direct, why = False, str(error)
    path = "handed to MPI, if a test at the start agrees" if direct else "staged through host memory"
    return {"aware": support.aware, "why": support.why, "path": path, "path_why": why}


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
