"""The ranks of one run of ``mpiplus bench``: an MPI communicator and process groups side by side."""

from __future__ import annotations

import os
import platform
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from ...communicator import cuda_path
from ...mpi import runtime
from ...names import BACKEND
from ...node import node
from . import device as devices
from .device import CPU, Device
from .front_end import EmptyGroup
from .measure import Call, take_turns
from .operations import Case, Raw
from .results import FRONT_END, NONBLOCKING, RAW, Row

Groups = dict[str, dist.ProcessGroup]
Made = TypeVar("Made")
#: Seconds for other ranks to fail as this one did.
_PATIENCE = 20.0


def _finish(request: MPI.Request) -> None:
    """Wait, and yield the core to slower ranks, as mpiplus does in an operation; a blocking call of Open MPI spins."""
    while not request.Test():
        os.sched_yield()


class RefusedError(Exception):
    """A contestant cannot do what is asked of it. Every rank raises it."""


@dataclass
class Session:
    """Ranks that measure together."""

    comm: MPI.Intracomm  # of the raw calls, and of the timer between its turns
    nodes: Sequence[str]  # where each rank is; the names are mpiplus's own and long
    raw: Sequence[str]  # what of plain MPI is measured: RAW, NONBLOCKING
    groups: Groups  # by contestant, a process group of all ranks
    device: Device = CPU  # where the groups' tensors are; those of raw MPI are in host memory

    def __post_init__(self) -> None:
        self.rank, self.size = int(self.comm.rank), int(self.comm.size)
        self.contestants = [*self.raw, *self.groups]  # what is compared

    def synchronise(self) -> None:
        """Return on no rank before every rank has called, and its device has done what it was to do."""
        self.settle()
        _finish(self.comm.Ibarrier())

    def settle(self) -> None:
        self.device.settle()

    def slowest(self, seconds: float) -> float:
        """Return the largest ``seconds`` of all ranks, on every rank."""
        largest = array("d", [seconds])
        _finish(self.comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX))
        return largest[0]

    def means(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all ranks of each of ``values``, on every rank."""
        sums = array("d", values)
        _finish(self.comm.Iallreduce(MPI.IN_PLACE, sums))
        return [one / self.size for one in sums]

    def facts(self) -> dict[str, str | int]:
        """Return what the numbers depend on, by name."""
        cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
        facts: dict[str, str | int] = {
            "date": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "host": platform.node(),
            "processor": names[0] if names else platform.machine(),
            "cores": os.cpu_count() or 0,
            "cores of rank 0": len(os.sched_getaffinity(0)),
            "load average": f"{os.getloadavg()[0]:.1f}",
            "ranks": self.size,
            "nodes": len(set(self.nodes)),
            "MPI": " ".join(runtime.library_name(MPI).split()),
            **{name: version(name) for name in ("mpi4py", "torch", "torchmpi-plugin")},
            "Python": platform.python_version(),
        }
        if not self.device.is_cpu:
            facts |= {
                "device of rank 0": torch.cuda.get_device_name(self.device.place),
                "ranks share devices": "yes: nccl, which refuses that, is left out" if self.device.is_shared else "no",
                "CUDA": str(torch.version.cuda),
                "CUDA tensors": f"{cuda_path.current.name}: {cuda_path.current.why}",
                "raw MPI": "on tensors in host memory",
            }
        return facts

    def place_of(self, contestant: str) -> Device:
        return CPU if contestant in (RAW, NONBLOCKING) else self.device

    def why_no_messages(self, contestant: str) -> str:
        """Say why a contestant cannot send plain messages from where its tensors are; empty if it can.

        It is not tried: gloo hands the address on the device to the kernel, fails, and the receiver waits for ever.
        """
        return f"{contestant} sends no tensors on devices" if contestant == "gloo" and not self.device.is_cpu else ""

    def tensors(self, case: Case) -> dict[str, tuple[Tensor, Tensor]]:
        """Return this rank's tensors for ``case`` by contestant: the same for all of those at one place."""
        at = {place: case.tensors(self.size, place) for place in set(map(self.place_of, self.contestants))}
        return {name: at[self.place_of(name)] for name in self.contestants}

    def on_all(self, make: Callable[[], Made], who: str = "") -> Made:
        """Make something on every rank, or on none.

        Raises:
            RefusedError: all ranks came here, and one of them cannot make it; ``who`` begins what it says.
            RuntimeError: this rank cannot, and others do not come: they wait for it in an operation. It ends the job.
        """
        made: list[Made] = []
        reason, problem = "", None
        try:
            made.append(make())
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            reason, problem = who + (str(error).strip().partition("\n")[0] or type(error).__name__), error
        everybody, start = self.comm.Ibarrier(), time.monotonic()
        while not everybody.Test():
            os.sched_yield()
            if problem and time.monotonic() > start + _PATIENCE:
                raise RuntimeError(f"{reason}, on this rank, while others go on") from problem
        if reasons := list(filter(None, self.comm.allgather(reason))):
            raise RefusedError(reasons[0])
        return made[0]

    def calls(self, case: Case) -> tuple[dict[str, Call], dict[str, str]]:
        """Return what to call for ``case`` by contestant, and for those that cannot, why; the same on every rank."""
        calls: dict[str, Call] = {}
        refusals: dict[str, str] = {}
        tensors = self.tensors(case)

        def first_call(name: str) -> Call:
            if case.operation.sends and (why_not := self.why_no_messages(name)):
                raise ValueError(why_not)
            if name in (RAW, NONBLOCKING):
                call = case.operation.raw(Raw(self.comm, blocking=name == RAW), *tensors[name])
            else:
                call = case.operation.torch(self.groups[name], *tensors[name])
            call()
            return call

        for name in self.contestants:
            try:
                calls[name] = self.on_all(partial(first_call, name))
            except RefusedError as error:
                refusals[name] = str(error)
        return calls, refusals

    def measure_case(self, case: Case, repeats: int, block_seconds: float) -> Row:
        calls, refusals = self.calls(case)
        timings = take_turns(calls, repeats, block_seconds, self)
        return Row(
            operation=case.operation.name,
            dtype=case.dtype,
            size=case.size,
            ranks=self.size,
            us={name: 1e6 * timing.median for name, timing in timings.items()},
            turns_us={name: [1e6 * seconds for seconds in timing["seconds"]] for name, timing in timings.items()},
            refusals=refusals,
        )


def new_groups(backends: Sequence[str], front_end: bool, device: Device = CPU) -> Groups:
    """Start torch.distributed; without nccl beside others where ranks share a device, which it refuses."""
    names = [name for name in backends if name != "nccl" or not device.is_shared] or backends
    # nccl has a barrier on the current device, which has been chosen.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device", UserWarning)
    dist.init_process_group(names[0], init_method="mpi://")
    groups: Groups = {}
    for name in names:
        group: Any = dist.new_group(backend=name) if groups else dist.group.WORLD
        groups |= by_path(group) if name == BACKEND and not device.is_cpu else {name: group}
    return groups | ({FRONT_END: EmptyGroup.of_all_ranks()} if front_end else {})


def by_path(group: dist.ProcessGroup) -> Groups:
    """Return this group and such on all other paths of CUDA tensors, by the names of the paths."""
    groups = {cuda_path.current.name: group}
    for path in cuda_path.others():
        with cuda_path.taking(path):
            groups[path.name] = dist.new_group(backend=BACKEND)
    return groups


@contextmanager
def open_session(
    raw: Sequence[str],
    make_groups: Callable[[Device], Groups],
    why_not: Callable[[Sequence[str]], str],
    kind: str = "cpu",
) -> Iterator[Session]:
    """Start MPI and torch.distributed on all ranks of the job, and end the latter.

    Args:
        raw: what of plain MPI to measure: RAW, NONBLOCKING.
        make_groups: starts torch.distributed for tensors on this rank's device; the groups by contestant.
        why_not: why nothing can be measured, or nothing, given where each rank is; asked of rank 0 before all else.
        kind: of device: "cpu" or "cuda".

    Raises:
        SystemExit: there is such a reason, or no device on some rank, which rank 0 has told.
    """
    comm = MPI.COMM_WORLD.Dup()
    nodes = comm.allgather(node.identity())
    reasons = comm.allgather((comm.rank == 0 and why_not(nodes)) or devices.why_not(kind))
    if any(reasons):
        _refuse(comm, next(filter(None, reasons)))
    device = devices.choose(kind, comm, nodes[: comm.rank].count(nodes[comm.rank]))
    try:
        yield Session(comm, nodes, raw, make_groups(device), device)
    except click.ClickException as error:  # on every rank
        dist.destroy_process_group()
        _refuse(comm, error.message)
    except BaseException:
        traceback.print_exc()
        comm.Abort(1)  # the other ranks wait for this one
    dist.destroy_process_group()
    comm.Free()


def _refuse(comm: MPI.Intracomm, reason: str) -> NoReturn:
    if comm.rank == 0:
        click.ClickException(reason).show()
    comm.Barrier()  # a launcher ends the job at the first rank that fails, before the others have said why
    comm.Free()
    raise SystemExit(1)
