"""Calls of c10d's methods in all their forms, and with several tensors for a rank, as functions of a rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchmpi_plugin.group import forms

SUM, MAX, AVG = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG
SOON = timedelta(seconds=30)


class Call(NamedTuple):
    """A method's arguments, and the tensors that hold the results then."""

    method: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: list[torch.Tensor]


def ramp(rank: int, length: int = 3, more: float = 0.0) -> torch.Tensor:
    return torch.arange(float(length)) + 10 * rank + more


def zeros(size: int, length: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(length) for _ in range(size)]


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


#: Of a rank: its results, and what is given to a method in front of all else.
Tensors = Callable[[int, int], tuple[list[torch.Tensor], tuple[Any, ...]]]


def in_place(rank: int, size: int, root: int | None = None) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    tensor = ramp(rank)
    return [tensor] if root in (None, rank) else [], (tensor,)


def gathered(rank: int, size: int, root: int | None = None) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    results = zeros(size) if root in (None, rank) else []
    return results, (results, ramp(rank))


def scattered(rank: int, size: int) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    output = torch.zeros(3)
    return [output], (output, [ramp(r) for r in range(size)] if rank == 0 else [])


def reduced(rank: int, size: int) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    output = torch.zeros(3)
    return [output], (output, [ramp(rank, more=r) for r in range(size)])


def exchanged(sizes: Callable[[list[int]], Any]) -> Tensors:
    def make(rank: int, size: int) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        rows = [(rank + peer) % 3 + 1 for peer in range(size)]  # symmetric
        output = torch.zeros(sum(rows))
        return [output], (output, ramp(rank, sum(rows)), sizes(rows), sizes(rows))

    return make


def form(method: str, tensors: Tensors, *rest: Any, names: str = "", **named: Any) -> Callable[[int, int], Call]:
    """``names``: those of the tensors, which are given by position otherwise."""

    def make(rank: int, size: int) -> Call:
        results, given = tensors(rank, size)
        by_name = dict(zip(names.split(), given, strict=True)) if names else {}
        return Call(method, (*(() if names else given), *rest), {**by_name, **named}, results)

    return make


FORMS: dict[str, Callable[[int, int], Call]] = {
    "allreduce(t, op, timeout)": form("allreduce", in_place, MAX, SOON),
    "allreduce(t, op, seconds)": form("allreduce", in_place, SUM, 30.0),
    "allreduce(tensor=)": form("allreduce", in_place, names="tensor"),
    "allreduce(tensor=, op=, timeout=)": form("allreduce", in_place, names="tensor", op=MAX, timeout=SOON),
    "broadcast(t, root, timeout)": form("broadcast", in_place, 1, SOON),
    "broadcast(tensor=, root=)": form("broadcast", in_place, names="tensor", root=1),
    "broadcast(t, numpy)": form("broadcast", in_place, numpy.int64(1)),
    "reduce(t, root)": form("reduce", lambda rank, size: in_place(rank, size, 1), 1),
    "reduce(t, root, op, timeout)": form("reduce", lambda rank, size: in_place(rank, size, 0), 0, MAX, SOON),
    "reduce(t, root=, op=)": form("reduce", lambda rank, size: in_place(rank, size, 0), root=0, op=MAX),
    "barrier(timeout)": form("barrier", lambda rank, size: ([], ()), SOON),
    "barrier(timeout=)": form("barrier", lambda rank, size: ([], ()), timeout=SOON),
    "allgather(list, t, timeout)": form("allgather", gathered, SOON),
    "allgather(output_tensors=, input_tensor=)": form("allgather", gathered, names="output_tensors input_tensor"),
    "gather(list, t, root, timeout)": form("gather", lambda rank, size: gathered(rank, size, 0), 0, SOON),
    "scatter(t, list, root, timeout)": form("scatter", scattered, 0, SOON),
    "scatter(t, list, root=)": form("scatter", scattered, root=0),
    "reduce_scatter(t, list, op, timeout)": form("reduce_scatter", reduced, MAX, SOON),
    "reduce_scatter(output=, input=)": form("reduce_scatter", reduced, names="output input"),
    "reduce_scatter(output=, input=, op=)": form("reduce_scatter", reduced, names="output input", op=MAX),
    "alltoall_base(numpy)": form("alltoall_base", exchanged(numpy.array), c10d.AllToAllOptions()),
    "alltoall_base(tuple, timeout)": form("alltoall_base", exchanged(tuple), SOON),
}


def several_reduced(op: Any, dtype: torch.dtype = torch.float32) -> Callable[..., Call]:
    def make(rank: int, size: int) -> Call:
        tensors = [ramp(rank, more=1).to(dtype), ramp(rank, more=2).to(dtype), ramp(rank).to(dtype)]
        return Call("allreduce", (tensors, options(c10d.AllreduceOptions, reduceOp=op)), {}, tensors)

    return make


def several_broadcast(root: int, index: int) -> Callable[..., Call]:
    def make(rank: int, size: int) -> Call:
        tensors = [ramp(rank), ramp(rank, more=1), ramp(rank, more=2)]
        how = options(c10d.BroadcastOptions, rootRank=root, rootTensor=index)
        return Call("broadcast", (tensors, how), {}, tensors)

    return make


def several_gathered(strided: bool, length: int = 3) -> Callable[..., Call]:
    def make(rank: int, size: int) -> Call:
        inputs = [ramp(rank, 2 * length, i)[::2] if strided else ramp(rank, length, i) for i in range(2)]
        lists = [zeros(2 * size, length) for _ in range(2)]
        return Call("allgather", (lists, inputs), {}, [tensor for each in lists for tensor in each])

    return make


def strided_reduced(rank: int, size: int) -> Call:
    tensors = [ramp(rank, 6)[::2], ramp(rank, 6, 1)[1::2]]
    return Call("allreduce", (tensors, MAX), {}, tensors)


def several_sparse(rank: int, size: int) -> Call:
    tensors = [torch.diag(ramp(rank, more=more)).to_sparse() for more in (0, 1)]
    return Call("allreduce", (tensors, SUM), {}, tensors)


SEVERAL: dict[str, Callable[[int, int], Call]] = {
    **{f"allreduce {op.name}": several_reduced(op) for op in (SUM, MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)},
    "allreduce SUM of int8": several_reduced(SUM, torch.int8),
    "allreduce BXOR": several_reduced(dist.ReduceOp.BXOR, torch.int32),
    "allreduce of sparse tensors": several_sparse,
    "broadcast the first": several_broadcast(0, 0),
    "broadcast another": several_broadcast(1, 2),
    "allgather": several_gathered(strided=False),
    "allgather of strided tensors": several_gathered(strided=True),
    "allgather of nothing": several_gathered(strided=False, length=0),
}


def is_left_to_newer_gloo(case: str) -> bool:
    """Older gloo adds, whatever the operation."""
    return case.startswith("reduce_scatter") and "op" in case and torch.__version__ < "2.13"


def made(group: Any, call: Call) -> list[torch.Tensor]:
    getattr(group, call.method)(*call.arguments, **call.named).wait()
    return call.results


def wanted_of(gloo: Any, call: Call) -> list[torch.Tensor]:
    try:
        if call.method in ("gather", "scatter") and torch.__version__ < "2.13" and "root" in call.named:
            raise TypeError("gloo wants no list on the other ranks, and this torch makes one of it")
        return made(gloo, call)
    except TypeError:  # an older torch has fewer forms
        assert torch.__version__ < "2.13"
        getattr(gloo, call.method)(*forms.read(call.method, call.arguments, call.named)).wait()
        return call.results


ONE = torch.ones(2)


def ones(length: int) -> torch.Tensor:
    """With gaps."""
    return torch.ones(2 * length)[::2]


def with_splits(rows: int, received: list[int], sent: list[int]) -> Callable[[Any, int], Any]:
    """As many rows for each rank, and sizes, which are the same for all."""
    return lambda g, size: g.alltoall_base(ones(rows * size), ones(rows * size), received * size, sent * size)


def no_such_tensor(index: int, *tensors: torch.Tensor) -> Callable[[Any, int], Any]:
    return lambda g, size: g.broadcast([*tensors], options(c10d.BroadcastOptions, rootTensor=index))


#: Refused where they are made, before anything is sent, with these words. gloo refuses the same.
WRONG: dict[str, Callable[[Any, int], Any]] = {
    "broadcast: .*root rank": lambda g, size: g.broadcast(ONE, size),
    "reduce: .*root rank": lambda g, size: g.reduce(ONE, -1),
    "all_reduce": lambda g, size: g.allreduce([], c10d.AllreduceOptions()),
    "all_reduce_coalesced: .*empty$": lambda g, size: g.allreduce_coalesced([]),
    ".*dtype": lambda g, size: g.allreduce([ONE, ONE.int()], SUM),
    "all_reduce.*shape": lambda g, size: g.allreduce([ONE, torch.ones(3)], SUM),
    ".*root tensor.*1": no_such_tensor(1, ONE),
    ".*root tensor.*-1": no_such_tensor(-1, ONE, ONE),
    "reduce: .*one tensor": lambda g, size: g.reduce([ONE, ONE]),
    "all_gather: .*outputs": lambda g, size: g.allgather([[ONE]] * 2, [ONE, ONE]),
    "all_gather: .*lists": lambda g, size: g.allgather([[ONE] * 2 * size], [ONE, ONE]),
    "all_gather: .*one list": lambda g, size: g.allgather([[ONE] * size] * 2, [ONE]),
    "gather: .*one list": lambda g, size: g.gather([[ONE] * size] * 2, [ONE], c10d.GatherOptions()),
    "scatter: .*one list": lambda g, size: g.scatter([ONE], [[ONE] * size] * 2, c10d.ScatterOptions()),
    "reduce_scatter: .*one list": lambda g, size: g.reduce_scatter([ONE], [[ONE] * size] * 2),
    "all_reduce: .*dense": lambda g, size: g.allreduce([ONE, ONE.to_sparse()], SUM),
    ".*shape": lambda g, size: g.allreduce([ONE.to_sparse(), torch.ones(3).to_sparse()], SUM),
    "all_gather: .*output list must": lambda g, size: g.allgather([], [ONE]),
}
#: The same; gloo takes some of these, or ends.
REFUSED: dict[str, Callable[[Any, int], Any]] = {
    r"all_gather_into_tensor: the output must have \d+ elements, not 1$": lambda g, size: g._allgather_base(
        ones(1), ones(2)
    ),
    "reduce_scatter_tensor: the input must have .* elements, not 1$": lambda g, size: g._reduce_scatter_base(
        ones(2), ones(1)
    ),
    "all_gather: this rank's output must have 2 elements, not 3$": lambda g, size: g.allgather(
        [[ones(3) for _ in range(size)]], [ones(2)]
    ),
    "reduce_scatter: the output must have 3 elements, not 2$": lambda g, size: g.reduce_scatter(
        [ones(2)], [[ones(3)] * size], c10d.ReduceScatterOptions()
    ),
    r"all_reduce: .* elements share memory .*clone": lambda g, size: g.allreduce([torch.zeros(1).expand(4)]),
    "broadcast: expected a dense tensor, .*sparse": lambda g, size: g.broadcast(torch.eye(3).to_sparse(), 0),
    ".* 2 entries, one for each input, not 1$": lambda g, size: g.allgather_into_tensor_coalesced([ONE], [ONE, ONE]),
    r"all_gather.*_coalesced: the output must have \d+ elements, not 1$": lambda g, size: (
        g.allgather_into_tensor_coalesced([ones(2 * size), ones(1)], [ones(2), ones(2)])
    ),
    "reduce_scatter.*_coalesced: the input must have .* not 1$": lambda g, size: g.reduce_scatter_tensor_coalesced(
        [ones(2), ones(2)], [ones(2 * size), ones(1)]
    ),
    "reduce_scatter.*_coalesced: BXOR makes": lambda g, size: g.reduce_scatter_tensor_coalesced(
        [ones(1).int(), ones(1)],
        [ones(size).int(), ones(size)],
        options(c10d.ReduceScatterOptions, reduceOp=dist.ReduceOp.BXOR),
    ),
    "all_gather_coalesced: this rank's output must have 2 elements, not 3$": lambda g, size: g.allgather_coalesced(
        [[ones(2), ones(3)] for _ in range(size)], [ones(2), ones(2)]
    ),
    "all_reduce_coalesced: .* elements share memory": lambda g, size: g.allreduce_coalesced(
        [ones(2), torch.zeros(1).expand(4)]
    ),
    r"all_to_all: the output list must have \d entries, one for each rank, not \d$": lambda g, size: g.alltoall(
        [ones(2)] * (size + 1), [ones(2)] * size
    ),
    "all_to_all: this rank sends itself 2 elements but expects 3$": lambda g, size: g.alltoall(
        [ones(3) for _ in range(size)], [ones(2)] * size
    ),
    "all_reduce: BXOR makes no sense for torch.float32$": lambda g, size: g.allreduce([ones(2)], dist.ReduceOp.BXOR),
    "all_gather_into_tensor: all tensors must have one dtype, not torch.float32 and torch.int32$": lambda g, size: (
        g._allgather_base(ones(2 * size).int(), ones(2))
    ),
    "all_to_all_single: input split sizes .* do not add up to its dimension 0": with_splits(2, [2], [3]),
    "all_to_all_single: output split sizes .* do not add up to its dimension 0": with_splits(2, [-1], [2]),
    r"all_to_all_single: output split sizes must have \d entries": with_splits(2, [1, 1], [2]),
    r"send: tag -1 is out of range; this MPI carries tags 0 to \d+$": lambda g, size: g.send([ones(2)], 0, -1),
    "recv: tag 1099511627776 is out of range": lambda g, size: g.recv([ones(2)], 0, 1 << 40),
    r"send: rank -1 is not in the group, whose ranks are 0 to \d+$": lambda g, size: g.send([ones(2)], -1, 0),
}
