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


def in_place(method: str, *rest: Any, name: str = "", only: int | None = None, **named: Any) -> Callable[..., Call]:
    """A call on one tensor, which may be named; ``only``: the rank that has a result."""

    def make(rank: int, size: int) -> Call:
        tensor = ramp(rank)
        arguments, words = ((), {name: tensor}) if name else ((tensor,), {})
        return Call(method, (*arguments, *rest), {**words, **named}, [tensor] if only in (None, rank) else [])

    return make


def gathered(*rest: Any, outputs: str = "", given: str = "", root: int | None = None, **named: Any) -> Callable:
    def make(rank: int, size: int) -> Call:
        receives = root in (None, rank)
        results = zeros(size) if receives else []
        words = {outputs: results, given: ramp(rank)} if outputs else {}
        arguments = () if outputs else (results, ramp(rank))
        return Call("allgather" if root is None else "gather", (*arguments, *rest), {**words, **named}, results)

    return make


def scattered(*rest: Any, **named: Any) -> Callable[..., Call]:
    def make(rank: int, size: int) -> Call:
        output = torch.zeros(3)
        return Call("scatter", (output, [ramp(r) for r in range(size)] if rank == 0 else [], *rest), named, [output])

    return make


def reduce_scattered(*rest: Any, by_name: bool = False, **named: Any) -> Callable[..., Call]:
    def make(rank: int, size: int) -> Call:
        output, inputs = torch.zeros(3), [ramp(rank, more=r) for r in range(size)]
        words = {"output": output, "input": inputs} if by_name else {}
        return Call("reduce_scatter", () if by_name else (output, inputs, *rest), {**words, **named}, [output])

    return make


def exchanged(sizes: Callable[[list[int]], Any], *rest: Any, **named: Any) -> Callable[..., Call]:
    def make(rank: int, size: int) -> Call:
        rows = [(rank + peer) % 3 + 1 for peer in range(size)]  # symmetric
        output = torch.zeros(sum(rows))
        arguments = (output, ramp(rank, sum(rows)), sizes(rows), sizes(rows), *rest)
        return Call("alltoall_base", arguments, named, [output])

    return make


FORMS: dict[str, Callable[[int, int], Call]] = {
    "allreduce(t, op, timeout)": in_place("allreduce", MAX, SOON),
    "allreduce(t, op, seconds)": in_place("allreduce", SUM, 30.0),
    "allreduce(tensor=)": in_place("allreduce", name="tensor"),
    "allreduce(tensor=, op=, timeout=)": in_place("allreduce", name="tensor", op=MAX, timeout=SOON),
    "broadcast(t, root, timeout)": in_place("broadcast", 1, SOON),
    "broadcast(tensor=, root=)": in_place("broadcast", name="tensor", root=1),
    "broadcast(t, numpy)": in_place("broadcast", numpy.int64(1)),
    "reduce(t, root)": in_place("reduce", 1, only=1),
    "reduce(t, root, op, timeout)": in_place("reduce", 0, MAX, SOON, only=0),
    "reduce(t, root=, op=)": in_place("reduce", root=0, op=MAX, only=0),
    "barrier(timeout)": lambda rank, size: Call("barrier", (SOON,), {}, []),
    "barrier(timeout=)": lambda rank, size: Call("barrier", (), {"timeout": SOON}, []),
    "allgather(list, t, timeout)": gathered(SOON),
    "allgather(output_tensors=, input_tensor=)": gathered(outputs="output_tensors", given="input_tensor"),
    "gather(list, t, root, timeout)": gathered(0, SOON, root=0),
    "scatter(t, list, root, timeout)": scattered(0, SOON),
    "scatter(t, list, root=)": scattered(root=0),
    "reduce_scatter(t, list, op, timeout)": reduce_scattered(MAX, SOON),
    "reduce_scatter(output=, input=)": reduce_scattered(by_name=True),
    "reduce_scatter(output=, input=, op=)": reduce_scattered(by_name=True, op=MAX),
    "alltoall_base(numpy)": exchanged(numpy.array, c10d.AllToAllOptions()),
    "alltoall_base(numpy 32)": exchanged(lambda rows: numpy.array(rows, dtype=numpy.int32)),
    "alltoall_base(tuple, timeout)": exchanged(tuple, SOON),
    "alltoall_base(torch.Size)": exchanged(torch.Size),
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
    **{f"allreduce SUM {dtype}": several_reduced(SUM, dtype) for dtype in (torch.int8, torch.int64, torch.float64)},
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
#: Refused where they are made, before anything is sent.
WRONG: dict[str, tuple[type[Exception], str, Callable[[Any, int], Any]]] = {
    "a root beyond the group": (ValueError, "root rank", lambda group, size: group.broadcast(ONE, size)),
    "a root below the group": (ValueError, "root rank", lambda group, size: group.reduce(ONE, -1)),
    "no tensors": (ValueError, "all_reduce", lambda group, size: group.allreduce([], c10d.AllreduceOptions())),
    "no tensors, coalesced": (ValueError, "empty", lambda group, size: group.allreduce_coalesced([])),
    "two dtypes": (TypeError, "dtype", lambda group, size: group.allreduce([ONE, ONE.int()], SUM)),
    "two shapes": (ValueError, "shape", lambda group, size: group.allreduce([ONE, torch.ones(3)], SUM)),
    "no such tensor": (
        ValueError,
        "root tensor",
        lambda group, size: group.broadcast([ONE], options(c10d.BroadcastOptions, rootTensor=1)),
    ),
    "no such tensor of two": (
        ValueError,
        "root tensor",
        lambda group, size: group.broadcast([ONE, ONE], options(c10d.BroadcastOptions, rootTensor=-1)),
    ),
    "two tensors to reduce": (ValueError, "one tensor", lambda group, size: group.reduce([ONE, ONE])),
    "too few outputs": (ValueError, "outputs", lambda group, size: group.allgather([[ONE]] * 2, [ONE, ONE])),
    "too few lists": (ValueError, "lists", lambda group, size: group.allgather([[ONE] * 2 * size], [ONE, ONE])),
    "two lists for one tensor": (
        ValueError,
        "one list",
        lambda group, size: group.allgather([[ONE] * size] * 2, [ONE]),
    ),
    "two lists to gather": (
        ValueError,
        "one list",
        lambda group, size: group.gather([[ONE] * size] * 2, [ONE], options(c10d.GatherOptions, rootRank=0)),
    ),
    "two lists to scatter": (
        ValueError,
        "one list",
        lambda group, size: group.scatter([ONE], [[ONE] * size] * 2, options(c10d.ScatterOptions, rootRank=0)),
    ),
    "two lists to reduce": (
        ValueError,
        "one list",
        lambda group, size: group.reduce_scatter([ONE], [[ONE] * size] * 2, c10d.ReduceScatterOptions()),
    ),
    "dense and sparse": (ValueError, "dense", lambda group, size: group.allreduce([ONE, ONE.to_sparse()], SUM)),
    "sparse and dense": (ValueError, "dense", lambda group, size: group.allreduce([ONE.to_sparse(), ONE], SUM)),
    "sparse of two shapes": (
        ValueError,
        "shape",
        lambda group, size: group.allreduce([ONE.to_sparse(), torch.ones(3).to_sparse()], SUM),
    ),
    "sizes that do not add up": (
        ValueError,
        "add up",
        lambda group, size: group.alltoall_base(ONE, ONE, numpy.array([5] * size), numpy.array([5] * size)),
    ),
    "no list for the outputs": (ValueError, "output list must", lambda group, size: group.allgather([], [ONE])),
}


def with_splits(rows: int, received: list[int], sent: list[int]) -> Callable[[Any, int], Any]:
    """As many rows for each rank, and sizes, which are the same for all."""
    return lambda group, size: group.alltoall_base(ones(rows * size), ones(rows * size), received * size, sent * size)


def ones(length: int) -> torch.Tensor:
    """With gaps."""
    return torch.ones(2 * length)[::2]


#: The same, by the words; gloo takes some of these, or ends.
REFUSED: dict[str, Callable[[Any, int], Any]] = {
    r"all_gather_into_tensor: the output must have \d+ elements, not 1$": lambda group, size: group._allgather_base(
        ones(1), ones(2)
    ),
    "reduce_scatter_tensor: the input must have .* elements, not 1$": lambda group, size: group._reduce_scatter_base(
        ones(2), ones(1)
    ),
    "all_gather: this rank's output must have 2 elements, not 3$": lambda group, size: group.allgather(
        [[ones(3) for _ in range(size)]], [ones(2)]
    ),
    "reduce_scatter: the output must have 3 elements, not 2$": lambda group, size: group.reduce_scatter(
        [ones(2)], [[ones(3)] * size], c10d.ReduceScatterOptions()
    ),
    r"all_reduce: .* elements share memory .*clone": lambda group, size: group.allreduce([torch.zeros(1).expand(4)]),
    "broadcast: expected a dense tensor, .*sparse": lambda group, size: group.broadcast(torch.eye(3).to_sparse(), 0),
    r"all_to_all: the output list must have \d entries, one for each rank, not \d$": lambda group, size: group.alltoall(
        [ones(2)] * (size + 1), [ones(2)] * size
    ),
    "all_to_all: this rank sends itself 2 elements but expects 3$": lambda group, size: group.alltoall(
        [ones(3) for _ in range(size)], [ones(2)] * size
    ),
    "all_reduce: BXOR makes no sense for torch.float32$": lambda group, size: group.allreduce(
        [ones(2)], dist.ReduceOp.BXOR
    ),
    "all_gather_into_tensor: all tensors must have one dtype, not torch.float32 and torch.int32$": lambda group, size: (
        group._allgather_base(ones(2 * size).int(), ones(2))
    ),
    "all_to_all_single: input split sizes .* do not add up to its dimension 0": with_splits(2, [2], [3]),
    "all_to_all_single: output split sizes .* do not add up to its dimension 0": with_splits(2, [-1], [2]),
    r"all_to_all_single: output split sizes must have \d entries": with_splits(2, [1, 1], [2]),
    r"send: tag -1 is out of range; this MPI carries tags 0 to \d+$": lambda group, size: group.send([ones(2)], 0, -1),
    "recv: tag 1099511627776 is out of range": lambda group, size: group.recv([ones(2)], 0, 1 << 40),
    r"send: rank -1 is not in the group, whose ranks are 0 to \d+$": lambda group, size: group.send([ones(2)], -1, 0),
}
