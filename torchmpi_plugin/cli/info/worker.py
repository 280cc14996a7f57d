"""The process that dares to call MPI, for one that does not: MPI may hang, print, or end the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ... import settings
from ...communicator import shared_memory, tuning
from ...communicator.choice import GroupConfig, choose, group_config
from ...flavours import Library
from ...launchers.variables import check_fit
from ...mpi import cuda_aware
from ...mpi import library as mpi_library
from ...names import CUDA_DRIVER
from ...node import node
from ...node.processes import python_command
from . import machine

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
    check_fit(found)
    tell(phase="MPI_Init")
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    tell(mpi=_initialised(mpi, found), rank=mpi.COMM_WORLD.Get_rank(), size=mpi.COMM_WORLD.Get_size())
    good = True
    if mpi.COMM_WORLD.Get_size() > 1:
        tell(phase="the exchange between all pairs of ranks")
        good = _meet(mpi, tell, pair_seconds, groups)
    tell(met=good)
    if good:
        if mpi.COMM_WORLD.Get_rank() == 0:
            tell(phase="the test of the CUDA driver")
            tell(cuda_on_node=staging_on_node(mpi))
        tell(phase="MPI_Finalize")
        mpi.Finalize()
    return good


def _initialised(module: Any, library: Library) -> dict[str, Any]:
    """Return what an initialised ``mpi4py.MPI`` says besides.

    Under ``cuda``: whether MPI takes CUDA buffers, how mpiplus therefore moves CUDA tensors, and why we think so.
    """
    levels = {getattr(module, f"THREAD_{name}"): name for name in _LEVELS}
    support = cuda_aware.support_of(module, os.environ)
    try:
        wanted, place = cuda_aware.asked_for(None, os.environ)
        direct, why = cuda_aware.path(support, wanted, place)
    except ValueError as error:
        wanted, direct, why = "", False, str(error)
    path = "handed to MPI, if a test at the start agrees" if direct else "staged through host memory"
    if wanted == "ipc":
        path = f"read from the other devices of the node where they can be, else {path}"
    return {
        "vendor": library.vendor,
        "version": library.version,
        "text": library.headline,
        "standard": ".".join(map(str, module.Get_version())),
        "abi": f"{_ABIS[library.abi]} ({library.abi})" if library.abi else "that which mpi4py was built for",
        "path": library.path or "unknown",
        "thread_level": f"MPI_THREAD_{levels[module.Query_thread()]}",
        "cuda": {"aware": support.aware, "why": support.why, "path": path, "path_why": why},
    }


def staging_on_node(module: Any) -> str:
    """How CUDA tensors are staged on this node, by the driver of its first device; empty: there is no driver."""
    shim = mpi_library.import_shim(module)
    lib, text = shim.lib, shim.ffi.new("char[]", 512)
    if failed := lib.mpp_cuda_load(CUDA_DRIVER.encode(), text, len(text)):
        return "" if failed < 0 else f"no device can be used: {shim.ffi.string(text).decode(errors='replace')}"
    length = min(module.COMM_WORLD.Get_size() * shared_memory.SLOTS << 20, shared_memory.SEGMENT_LIMIT)
    try:
        descriptor = shared_memory.create_file(length)
        segment = shared_memory.Segment(lib, shim.ffi, descriptor, length)
    except OSError as error:
        return f"on a node through pinned memory, as there is no shared memory: {error}"
    code = lib.mpp_cuda_registers(0, segment.address, length)
    segment.close()
    os.close(descriptor)
    if not code:
        return "on a node the device copies to and from shared memory"
    lib.mpp_cuda_error_text(code, text, len(text))
    why = shim.ffi.string(text).decode(errors="replace")
    return f"on a node through pinned memory, as the driver does not register shared memory: {why}"


def _meet(module: Any, tell: Any, pair_seconds: float, groups: bool) -> bool:
    talk = Talk(module, pair_seconds)
    failed = talk.try_all()
    name = os.uname().nodename
    cpus = sorted(os.sched_getaffinity(0))
    about = {"host": name, "node": node.identity(), "cpus": cpus, "cores": node.cores(cpus), "all": os.cpu_count()}
    if groups:
        about |= own_report()
    reports = talk.gather({**about, "failed": {str(peer): why for peer, why in failed.items()}})
    if talk.rank == 0:
        bad = failed_pairs(reports, talk.size)
        tell(reports={str(rank): report for rank, report in reports.items()}, failed_pairs=bad)
        if groups and len(reports) == talk.size:
            tell(group=cost(module, reports))
        return talk.agree(not bad)
    return talk.agree(True)


# ---- a test of each pair of ranks with deadlines only: no collective, which one bad link would hang ----

_BYTES = 1 << 16  # more than any MPI sends unasked, so that the way for long messages is tried as well
_NOTHING_CAME, _NOT_TAKEN = "nothing came from it", "it did not take a message"
_PAIR, _REPORT, _RESULT = 1, 2, 3  # tags


class Talk:
    """Point-to-point messages of one rank, none of which is waited for longer than a deadline."""

    def __init__(self, module: Any, seconds: float) -> None:
        self._mpi = module
        self._comm = module.COMM_WORLD  # a duplicate would be a collective
        self._seconds = seconds
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._kept: list[Any] = []  # buffers that MPI may still use

    def try_all(self) -> dict[int, str]:
        """Exchange a message with every other rank; those with whom that failed, and how."""
        ready, peers = bytearray(_BYTES), [peer for peer in range(self.size) if peer != self.rank]
        buffers = {peer: bytearray(_BYTES) for peer in peers}
        self._kept += [ready, buffers]
        failed: dict[int, str] = {}
        left: dict[tuple[int, str], Any] = {}
        for call, what in ((self._comm.Irecv, _NOTHING_CAME), (self._comm.Isend, _NOT_TAKEN)):
            for peer in peers:
                buffer = buffers[peer] if what == _NOTHING_CAME else ready
                try:
                    left[peer, what] = call([buffer, self._mpi.BYTE], peer, _PAIR)
                except self._mpi.Exception as error:
                    failed.setdefault(peer, str(error))
        self._wait(left, failed)
        self._kept += left.values()
        for peer, what in left:
            failed.setdefault(peer, f"{what} within {self._seconds:g} s")
        return failed

    def _wait(self, left: dict[tuple[int, str], Any], failed: dict[int, str]) -> None:
        """Test requests to the end, or to the deadline; what is in ``left`` afterwards is not complete."""
        until = time.monotonic() + self._seconds
        while left and time.monotonic() < until:
            for (peer, what), request in list(left.items()):
                try:
                    if request.Test():
                        del left[peer, what]
                except self._mpi.Exception as error:
                    failed.setdefault(peer, str(error))
                    del left[peer, what]
            time.sleep(0.001 if left else 0)

    def gather(self, report: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """On rank 0 the reports of all ranks that it hears of; elsewhere nothing."""
        if self.rank:
            self._post(0, json.dumps(report).encode(), _REPORT)
            return {}
        found: dict[int, dict[str, Any]] = {0: dict(report)}
        until = time.monotonic() + self._seconds + 2.0  # ranks with a failed pair come that much later
        while len(found) < self.size and (heard := self._hear(self._mpi.ANY_SOURCE, _REPORT, until)):
            found[heard[0]] = json.loads(heard[1])
        return found

    def agree(self, good: bool) -> bool:
        """Rank 0's result, on every rank; False where it does not come."""
        if self.rank == 0:
            for peer in range(1, self.size) if good else ():
                self._post(peer, b"g", _RESULT)
            return good
        return self._hear(0, _RESULT, time.monotonic() + 2 * self._seconds + 4.0) is not None

    def _hear(self, source: int, tag: int, until: float) -> tuple[int, bytearray] | None:
        """A message, and whose it is; None: none comes."""
        status = self._mpi.Status()
        while time.monotonic() < until:
            if self._comm.Iprobe(source, tag, status):
                data = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv([data, self._mpi.BYTE], status.Get_source(), tag)
                return status.Get_source(), data
            time.sleep(0.001)
        return None

    def _post(self, peer: int, data: bytes, tag: int) -> None:
        self._kept.append(data)
        request = self._comm.Isend([data, self._mpi.BYTE], peer, tag)
        self._kept.append(request)
        self._wait({(peer, ""): request}, {})


def failed_pairs(reports: Mapping[int, Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """The pairs that cannot talk, by what both sides say."""
    pairs: dict[tuple[int, int], str] = {}
    for rank, report in sorted(reports.items()):
        for peer, why in report["failed"].items():
            pair = (min(rank, int(peer)), max(rank, int(peer)))
            pairs.setdefault(pair, f"rank {rank}: {why}")
    for rank in range(size):
        if rank not in reports:
            pairs.setdefault((0, rank), "rank 0: no report came from it")
    names = {rank: report["host"] for rank, report in reports.items()}
    return [
        {"ranks": list(pair), "hosts": [names.get(rank, "unknown") for rank in pair], "why": why}
        for pair, why in sorted(pairs.items())
    ]


# ---- what a group of all ranks costs in memory, as a communicator would find it ----


def own_report() -> dict[str, Any]:
    """Return what rank 0 has to know of this rank."""
    try:
        wanted, problem = group_config(None, None)._asdict(), ""
    except ValueError as error:
        wanted, problem = {}, str(error)
    here = machine.shared_memory()
    return {"config": wanted, "problem": problem, "free_bytes": here["free_bytes"] if here["usable"] else 0}


def cost(module: Any, reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The cost of a group of all ranks.

    Args:
        module: ``mpi4py.MPI``.
        reports: by rank, of all of them; each has the ``host``, the ``node``, and what :func:`own_report` tells.

    Returns:
        The ``path`` of its collectives, its ``selection``, and by node bytes: of the segment, and what is free for it;
        of each rank's own, at once and later. Or the ``problem`` for which there can be no group.
    """
    in_order = [reports[rank] for rank in sorted(reports)]
    if problems := [report["problem"] for report in in_order if report["problem"]]:
        return {"problem": problems[0]}
    places = node.places([report["node"] for report in in_order])
    firsts = [report for report, place in zip(in_order, places, strict=True) if not place.local_rank]
    wanted = GroupConfig(**in_order[0]["config"])
    limits, file = None, settings.TUNING.value()
    if file and wanted.collectives == "auto":
        try:
            limits = tuning.limits(file, len(firsts), module.get_vendor()[0])
        except ValueError as error:
            return {"problem": str(error)}
    choice = choose(wanted.collectives, len(firsts), limits)
    nodes = []
    if choice.own:
        shim = mpi_library.import_shim(module)
        costs = shared_memory.of_layout(shim.lib, shim.ffi, places, wanted.reproducible, choice)
        for first, found in zip(firsts, costs, strict=True):
            sizes = {"segment_bytes": found.segment, "rank_bytes": found.own, "rank_bytes_later": found.later}
            nodes.append({"host": first["host"], "free_bytes": first["free_bytes"], **sizes})
    selection = choice.table(len(firsts), len(places))
    return {"path": choice.describe(len(firsts)), "selection": selection, "nodes": nodes}
