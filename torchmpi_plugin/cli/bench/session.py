"""The ranks of one run of ``mpiplus bench``: an MPI communicator and process groups side by side."""

from __future__ import annotations

import os
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import click
import torch.distributed as dist
from mpi4py import MPI

from ...node import node
from .front_end import EmptyGroup
from .measure import Call, Turns, take_turns
from .operations import Case, Raw
from .report import machine_facts
from .results import FRONT_END, NONBLOCKING, RAW, Row

Groups = dict[str, dist.ProcessGroup]


def _finish(request: MPI.Request) -> None:
    """Wait, and yield the core to slower ranks, as mpiplus does in an operation; a blocking call of Open MPI spins."""
    while not request.Test():
        os.sched_yield()


class Session:
    """Ranks that measure together.

    Attributes:
        rank: this process's.
        size: how many there are.
        nodes: where each rank is; the names are mpiplus's own and long.
        comm: the communicator of the raw calls, and of the timer between its turns.
        groups: by contestant, a process group of all ranks.
        contestants: what is compared: raw MPI if wanted, then the groups.
    """

    def __init__(self, comm: MPI.Intracomm, nodes: Sequence[str], raw: Sequence[str], groups: Groups) -> None:
        self.comm = comm
        self.nodes = nodes
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.groups = groups
        self.contestants = [*raw, *groups]

    def synchronise(self) -> None:
        """Return on no rank before every rank has called."""
        _finish(self.comm.Ibarrier())

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
        library = MPI.Get_library_version().partition("\n")[0].partition(",")[0]
        return machine_facts(self.size, len(set(self.nodes)), " ".join(library.split()))

    def calls(self, case: Case) -> tuple[dict[str, Call], dict[str, str]]:
        """Return what to call for ``case`` by contestant, and for those that cannot, why; the same on every rank."""
        calls: dict[str, Call] = {}
        refusals: dict[str, str] = {}
        send, recv = case.tensors(self.size)
        for name in self.contestants:
            reason = ""
            try:
                if name in (RAW, NONBLOCKING):
                    calls[name] = case.operation.raw(Raw(self.comm, blocking=name == RAW), send, recv)
                else:
                    calls[name] = case.operation.torch(self.groups[name], send, recv)
                calls[name]()
            except (RuntimeError, TypeError, ValueError) as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
            reasons = [found for found in self.comm.allgather(reason) if found]
            if reasons:
                calls.pop(name, None)
                refusals[name] = reasons[0]
        return calls, refusals

    def measure(self, calls: Mapping[str, Call], repeats: int, block_seconds: float) -> dict[str, Turns]:
        """Time ``calls`` in turns; see :func:`~torchmpi_plugin.cli.bench.measure.take_turns`."""
        return take_turns(calls, repeats, block_seconds, self)

    def measure_case(self, case: Case, repeats: int, block_seconds: float) -> Row:
        """Time all contestants on one case."""
        calls, refusals = self.calls(case)
        timings = self.measure(calls, repeats, block_seconds)
        return Row(
            operation=case.operation.name,
            dtype=case.dtype,
            size=case.size,
            ranks=self.size,
            us={name: 1e6 * timing.median for name, timing in timings.items()},
            turns_us={name: [1e6 * seconds for seconds in timing.seconds] for name, timing in timings.items()},
            refusals=refusals,
        )


def new_groups(backends: Sequence[str], front_end: bool) -> Groups:
    """Start torch.distributed."""
    first, *others = backends
    dist.init_process_group(first, init_method="mpi://")
    groups = {first: dist.group.WORLD} | {name: dist.new_group(backend=name) for name in others}
    return groups | ({FRONT_END: EmptyGroup.of_all_ranks()} if front_end else {})


@contextmanager
def open_session(
    raw: Sequence[str], make_groups: Callable[[], Groups], why_not: Callable[[Sequence[str]], str]
) -> Iterator[Session]:
    """Start MPI and torch.distributed on all ranks of the job, and end the latter.

    Args:
        raw: what of plain MPI to measure: RAW, NONBLOCKING.
        make_groups: starts torch.distributed; the groups by contestant.
        why_not: why nothing can be measured, or nothing, given where each rank is; asked of rank 0 before all else.

    Raises:
        SystemExit: there is such a reason, which rank 0 has told.
    """
    comm = MPI.COMM_WORLD.Dup()
    nodes = comm.allgather(node.identity())
    if reason := comm.bcast(why_not(nodes) if comm.rank == 0 else ""):
        _refuse(comm, reason)
    try:
        yield Session(comm, nodes, raw, make_groups())
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
