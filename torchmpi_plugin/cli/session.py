"""The ranks of one run of ``mpiplus bench``: an MPI communicator and process groups side by side."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from mpi4py import MPI

from .measure import Call, Timing, interleave
from .operations import Case
from .report import machine_facts
from .results import RAW, Row


class Session:
    """Ranks that measure together.

    Attributes:
        rank: this process's.
        size: how many there are.
        comm: the communicator of the raw calls, and of the timer between its turns.
        groups: by backend, a process group of all ranks.
        contestants: what is compared: ``raw`` if wanted, then the backends.
    """

    def __init__(self, comm: MPI.Intracomm, groups: Mapping[str, dist.ProcessGroup], raw: bool) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.groups = groups
        self.contestants = [*([RAW] if raw else []), *groups]

    def synchronise(self) -> None:
        """Return on no rank before every rank has called."""
        self.comm.Barrier()

    def slowest(self, seconds: float) -> float:
        """Return the largest ``seconds`` of all ranks, on every rank."""
        largest: float = self.comm.allreduce(seconds, MPI.MAX)
        return largest

    def facts(self) -> dict[str, str | int]:
        """Return what the numbers depend on, by name."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        nodes = self.comm.allreduce(int(node.rank == 0))
        node.Free()
        library = MPI.Get_library_version().partition("\n")[0].partition(",")[0]
        return machine_facts(self.size, nodes, " ".join(library.split()))

    def calls(self, case: Case) -> tuple[dict[str, Call], dict[str, str]]:
        """Return what to call for ``case`` by contestant, and for those that cannot, why; the same on every rank."""
        calls: dict[str, Call] = {}
        refusals: dict[str, str] = {}
        send, recv = case.tensors(self.size)
        for name in self.contestants:
            reason = ""
            try:
                if name == RAW:
                    calls[name] = case.operation.raw(self.comm, send, recv)
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

    def measure(self, calls: Mapping[str, Call], repeats: int, block_seconds: float) -> dict[str, Timing]:
        """Time ``calls`` in turns; see :func:`~torchmpi_plugin.cli.measure.interleave`."""
        return interleave(calls, repeats, block_seconds, self)

    def measure_case(self, case: Case, repeats: int, block_seconds: float) -> Row:
        """Time all contestants on one case."""
        calls, refusals = self.calls(case)
        timings = self.measure(calls, repeats, block_seconds)
        return Row(
            operation=case.operation.name,
            dtype=case.dtype,
            size=case.size,
            us={name: 1e6 * timing.median for name, timing in timings.items()},
            turns_us={name: [1e6 * seconds for seconds in timing.seconds] for name, timing in timings.items()},
            refusals=refusals,
        )


@contextmanager
def open_session(backends: Sequence[str], raw: bool) -> Iterator[Session]:
    """Start MPI and torch.distributed on all ranks of the job, and end the latter.

    Args:
        backends: the first becomes torch's default group, each other one a group of all ranks beside it.
        raw: whether to measure plain MPI calls too.
    """
    comm = MPI.COMM_WORLD.Dup()
    first, *others = backends
    dist.init_process_group(first, init_method="mpi://")
    groups = {first: dist.group.WORLD} | {name: dist.new_group(backend=name) for name in others}
    try:
        yield Session(comm, groups, raw)
    except BaseException:
        traceback.print_exc()
        comm.Abort(1)  # the other ranks wait for this one
    dist.destroy_process_group()
    comm.Free()
