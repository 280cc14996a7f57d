"""The operations that ``mpiplus bench`` measures: one table, each row in raw mpi4py and in torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from .device import Device
from .measure import Call
from .results import fit_size

Share = Literal["whole", "part"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Raw:
    """A communicator, and how it is called: blocking, or not and then ``Wait``."""

    comm: MPI.Comm
    blocking: bool

    def call(self, method: str, *arguments: object) -> Call:
        """Return a call of the blocking ``method``, or of what MPI has for it besides."""
        if self.blocking:
            return partial(getattr(self.comm, method), *arguments)
        start = getattr(self.comm, f"I{method.lower()}")
        return lambda: start(*arguments).Wait()


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    name: str  # torch.distributed's, where it has one
    #: the call on a communicator, given the tensors to send from and to receive into
    raw: Callable[[Raw, Tensor, Tensor], Call]
    torch: Callable[[dist.ProcessGroup, Tensor, Tensor], Call]  # the same on a process group
    dtypes: tuple[str, ...] = ("float32",)  # what to measure it with; none for an operation without data
    send: Share = "whole"  # whether the tensor sent is the whole of the data or one rank's part of it
    recv: Share | None = None  # the same of the tensor received; None where both are one tensor
    sends: bool = False  # whether it consists of messages
    least_ranks: int = 1  # the fewest ranks it makes sense on


@dataclass(frozen=True)
class Case:
    """An operation on one dtype and size."""

    operation: Operation  # what is measured
    dtype: str  # the name of the dtype; empty for an operation without data
    size: int  # bytes of the whole of the data

    def tensors(self, ranks: int, device: Device) -> tuple[Tensor, Tensor]:
        """Return this rank's tensors to send from and to receive into."""
        if not self.dtype:
            return torch.empty(0, device="cpu"), torch.empty(0, device="cpu")
        dtype = DTYPES[self.dtype]
        whole = self.size // dtype.itemsize
        counts = {"whole": whole, "part": whole // ranks}
        send = device.tensor(counts[self.operation.send], dtype)
        return send, send if self.operation.recv is None else device.tensor(counts[self.operation.recv], dtype)


def raw_message(tensor: Tensor) -> list[object]:
    """Return a tensor's memory with its datatype, as mpi4py reads it fastest; a TypeError if MPI has none for it."""
    bfloat16 = getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL)
    datatype = {torch.float32: MPI.FLOAT, torch.bfloat16: bfloat16}[tensor.dtype]
    if datatype == MPI.DATATYPE_NULL:
        raise TypeError(f"this MPI has no datatype for {tensor.dtype}")
    return [tensor.view(torch.uint8).numpy(), datatype]


def _ping_pong(rank: int, ranks: int, call: Callable[[str, int], Call]) -> Call:
    """Ranks 0 and 1 play, 2 and 3, and so on; the last of an odd number looks on. ``call``: a name, a rank."""
    peer = rank ^ 1
    if peer >= ranks:
        return lambda: None
    first, second = (call(name, peer) for name in (("send", "recv") if rank < peer else ("recv", "send")))

    def round_trip() -> None:
        first()
        second()

    return round_trip


def _raw_ping_pong(raw: Raw, ball: Tensor, _: Tensor) -> Call:
    message = raw_message(ball)
    return _ping_pong(raw.comm.rank, raw.comm.size, lambda name, peer: raw.call(name.title(), message, peer))


def _torch_ping_pong(group: dist.ProcessGroup, ball: Tensor, _: Tensor) -> Call:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return _ping_pong(rank, ranks, lambda name, peer: partial(getattr(dist, name), ball, peer, group=group))


def _of_two(name: str, method: str, call: Callable[..., object], send: Share, recv: Share) -> Operation:
    """A collective that sends from one tensor and receives into another."""
    return Operation(
        name,
        raw=lambda raw, out, into: raw.call(method, raw_message(out), raw_message(into)),
        torch=lambda group, out, into: partial(call, into, out, group=group),
        send=send,
        recv=recv,
    )


# torch 2.13 renamed these two, and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "all_reduce",
            raw=lambda raw, _, data: raw.call("Allreduce", MPI.IN_PLACE, raw_message(data)),
            torch=lambda group, _, data: partial(dist.all_reduce, data, group=group),
            dtypes=("float32", "bfloat16"),
        ),
        Operation("ping_pong", raw=_raw_ping_pong, torch=_torch_ping_pong, sends=True, least_ranks=2),
        Operation(
            "barrier",
            raw=lambda raw, *_: raw.call("Barrier"),
            torch=lambda group, *_: partial(dist.barrier, group=group),
            dtypes=(),
        ),
        Operation(
            "broadcast",
            raw=lambda raw, _, data: raw.call("Bcast", raw_message(data), 0),
            torch=lambda group, _, data: partial(dist.broadcast, data, 0, group=group),
        ),
        _of_two("all_gather_into_tensor", "Allgather", _all_gather_single, "part", "whole"),
        _of_two("reduce_scatter_tensor", "Reduce_scatter_block", _reduce_scatter_single, "whole", "part"),
        _of_two("all_to_all_single", "Alltoall", dist.all_to_all_single, "whole", "whole"),
    )
}


def plan(operations: Sequence[Operation], sizes: Sequence[int], ranks: int) -> list[Case]:
    """Return the cases to measure on ``ranks`` ranks, each size rounded up to whole elements for every rank."""
    cases = []
    for operation in operations:
        if ranks < operation.least_ranks:
            continue
        cases += [] if operation.dtypes else [Case(operation, "", 0)]
        parts = 1 if operation.recv is None else ranks
        for dtype in operation.dtypes:
            fitting = {fit_size(size, DTYPES[dtype].itemsize, parts) for size in sizes}
            cases += [Case(operation, dtype, size) for size in sorted(fitting)]
    return cases
