"""All forms of c10d's methods, and several tensors for a rank: what gloo computes, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from groups import GROUP_TIMEOUT, on_gloo
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


SEVERAL: dict[str, Callable[[int, int], Call]] = {
    **{f"allreduce {op.name}": several_reduced(op) for op in (SUM, MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)},
    **{f"allreduce SUM {dtype}": several_reduced(SUM, dtype) for dtype in (torch.int8, torch.int64, torch.float64)},
    "allreduce BXOR": several_reduced(dist.ReduceOp.BXOR, torch.int32),
    "broadcast the first": several_broadcast(0, 0),
    "broadcast another": several_broadcast(1, 2),
    "allgather": several_gathered(strided=False),
    "allgather of strided tensors": several_gathered(strided=True),
    "allgather of nothing": several_gathered(strided=False, length=0),
}


@pytest.fixture(scope="module")
def gloo(world) -> Iterator[Any]:
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    yield group
    dist.destroy_process_group(group)


@pytest.fixture(scope="module")
def wanted(channel, world) -> dict[str, list[torch.Tensor]]:
    """What gloo makes of each case."""
    cases = {case: make for case, make in {**FORMS, **SEVERAL}.items() if not is_left_to_newer_gloo(case)}
    return on_gloo(
        channel,
        lambda gloo: {case: wanted_of(gloo, make(world.rank, world.size)) for case, make in cases.items()},
    )


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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", [*FORMS, *SEVERAL])
def test_as_over_gloo(case: str, wanted, group, world) -> None:
    if is_left_to_newer_gloo(case):
        pytest.skip("older gloo adds, whatever the operation")
    got = made(group, {**FORMS, **SEVERAL}[case](world.rank, world.size))
    assert len(got) == len(wanted[case])
    for mine, its in zip(got, wanted[case], strict=True):
        # A product of floats is rounded in the order of its factors, which nobody promises.
        torch.testing.assert_close(
            mine, its, rtol=None if "PRODUCT" in case else 0, atol=None if "PRODUCT" in case else 0
        )


@pytest.mark.mpi(min_size=2)
def test_strided_tensors_are_reduced_in_place(group, world) -> None:
    """gloo reduces other elements than those of the tensors."""
    call = strided_reduced(world.rank, world.size)
    assert all(tensor.tolist() == [10 * world.size - 10 + value for value in (2, 4, 6)] for tensor in made(group, call))


def test_the_average_of_several_is_over_ranks(group, world) -> None:
    """gloo divides the first tensor by the number of ranks, and the others not."""
    call = several_reduced(AVG)(world.rank, world.size)
    total = sum(ramp(rank, more=more) for rank in range(world.size) for more in (0, 1, 2)) / world.size
    for tensor in made(group, call):
        torch.testing.assert_close(tensor, total)


@pytest.mark.mpi(min_size=2)
def test_a_timeout_of_the_call_is_kept(new_group, world, channel) -> None:
    """Given by position, where c10d's options have it; the others do not come."""
    group, error = new_group(None), ""
    if world.rank == 0:
        try:
            group.barrier(timedelta(seconds=0.2)).wait()
        except dist.DistBackendError as caught:
            error = str(caught)
    channel.barrier()
    assert ("barrier" in error and "timed out" in error) == (world.rank == 0), error


ONE = torch.ones(2)
#: On every rank alike, so that all go on.
WRONG: dict[str, tuple[type[Exception], str, Callable[[Any, int], Any]]] = {
    "a root beyond the group": (ValueError, "root rank", lambda group, size: group.broadcast(ONE, size)),
    "a root below the group": (ValueError, "root rank", lambda group, size: group.reduce(ONE, -1)),
    "an operation for a timeout": (TypeError, "broadcast", lambda group, size: group.broadcast(ONE, 0, SUM)),
    "a timeout for an operation": (TypeError, "allreduce", lambda group, size: group.allreduce(ONE, SOON)),
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
    "sizes that do not add up": (
        ValueError,
        "add up",
        lambda group, size: group.alltoall_base(ONE, ONE, numpy.array([5] * size), numpy.array([5] * size)),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_send_nothing(case: str, gloo, group, world) -> None:
    """Who catches what gloo raises catches this too."""
    kind, words, call = WRONG[case]
    with pytest.raises(kind, match=words) as ours:
        call(group, world.size)
    if case != "sizes that do not add up":  # which gloo begins, with memory that is not the tensor's
        with pytest.raises(Exception) as theirs:
            call(gloo, world.size)
        assert isinstance(ours.value, RuntimeError) or not isinstance(theirs.value, RuntimeError)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == world.size


@pytest.mark.mpi(min_size=2)
def test_a_root_of_another_group(new_group, world) -> None:
    group = new_group([0])
    if world.rank == 0:
        with pytest.raises(ValueError, match="not part of group"):
            dist.broadcast(torch.ones(1), 1, group=group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["allgather", "allreduce"])
def test_unequal_numbers_of_tensors(operation: str, new_group, world) -> None:
    """All are told of an all_gather; to all_reduce it is one tensor whatever it was made of."""
    group, count = new_group(None), 2 if world.rank else 1
    tensors = [torch.ones(2) for _ in range(count)]
    if operation == "allreduce":
        group.allreduce(tensors, SUM).wait()
        assert all(tensor.tolist() == [2 * world.size - 1] * 2 for tensor in tensors)
        return
    lists = [[torch.zeros(2) for _ in range(count * world.size)] for _ in range(count)]
    with pytest.raises((dist.DistBackendError, ValueError), match="all_gather"):
        group.allgather(lists, tensors).wait()
