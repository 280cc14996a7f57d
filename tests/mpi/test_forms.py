"""All forms of c10d's methods, and several tensors for a rank: what gloo computes, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import GROUP_TIMEOUT, assert_usable, on_gloo
from method_calls import (
    AVG,
    FORMS,
    REFUSED,
    SEVERAL,
    SUM,
    WRONG,
    is_left_to_newer_gloo,
    made,
    options,
    ramp,
    several_reduced,
    strided_reduced,
    wanted_of,
)
from torch.distributed import distributed_c10d as c10d


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
        channel, lambda gloo: {case: wanted_of(gloo, make(world.rank, world.size)) for case, make in cases.items()}
    )


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


#: Old names of methods, and those since torch 2.13 or later.
NAMES = (
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single_coalesced", "alltoall_base", "all_to_all_single"),
)


@pytest.mark.parametrize("name", NAMES)
def test_old_and_new_method_names(name: str, group, world) -> None:
    gathers, exchanges, ranks = "gather" in name, "all_to_all" in name or "alltoall" in name, range(world.size)
    given, output = ramp(world.rank, 1 if gathers else world.size), torch.zeros(1 if "scatter" in name else world.size)
    operands = ([output], [given]) if "coalesced" in name else (output, given)
    getattr(group, name)(*operands, *(([], []) if exchanges else ())).wait()
    column = [10 * rank + (0 if gathers else world.rank) for rank in ranks]
    assert output.tolist() == ([sum(column)] if "scatter" in name else column)


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
def test_the_future_has_the_lists_that_gloos_has(gloo, group, world) -> None:
    values = []
    for each in (gloo, group):
        call = SEVERAL["allgather"](world.rank, world.size)
        values.append(each.allgather(*call.arguments).get_future().wait())
    assert [len(outputs) for outputs in values[1]] == [2 * world.size] * 2
    torch.testing.assert_close(values[1], values[0])


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


@pytest.mark.parametrize("words", [*WRONG, *REFUSED])
def test_wrong_arguments_send_nothing(words: str, gloo, group, world) -> None:
    """Nobody but rank 0 calls. Who catches what gloo raises catches this too; an older one has other forms."""
    call = {**WRONG, **REFUSED}[words]
    if world.rank == 0:
        with pytest.raises((ValueError, TypeError), match=f"^{words}".replace("$", r" \(group '")) as ours:
            call(group, world.size)
        if words in WRONG and torch.__version__ >= "2.13":
            with pytest.raises((RuntimeError, TypeError)) as its:
                call(gloo, world.size)
            assert isinstance(ours.value, its.type), f"{type(ours.value).__mro__}, and gloo {its.type}"
    assert_usable(group)


@pytest.mark.mpi(min_size=2)
def test_unequal_numbers_of_tensors_to_broadcast(gloo, group, world) -> None:
    """Of each rank one takes part: the one at the root, or the one that the rank names."""
    results = []
    for each in (gloo, group):
        tensors = [ramp(world.rank, more=more) for more in range(2 if world.rank else 1)]
        how = options(c10d.BroadcastOptions, rootTensor=len(tensors) - 1)
        each.broadcast(tensors, how).wait()
        results.append(torch.stack(tensors))
    assert torch.equal(*results) and torch.equal(results[1][0], ramp(0))


@pytest.mark.mpi(min_size=2)
def test_unequal_numbers_of_tensors(new_group, world) -> None:
    """All are told of an all_gather; to all_reduce it is one tensor whatever it was made of."""
    group, count = new_group(None), 2 if world.rank else 1
    tensors = [torch.ones(2) for _ in range(count)]
    group.allreduce(tensors, SUM).wait()
    assert all(tensor.tolist() == [2 * world.size - 1] * 2 for tensor in tensors)
    lists = [[torch.zeros(2) for _ in range(count * world.size)] for _ in range(count)]
    with pytest.raises((dist.DistBackendError, ValueError), match="all_gather"):
        group.allgather(lists, tensors).wait()


#: One operation for each tensor.
COALESCED: dict[str, Callable[[Any, list[torch.Tensor], list[torch.Tensor]], Any]] = {
    "allreduce_coalesced": lambda group, short, long: group.allreduce_coalesced(short),
    "allgather_into_tensor_coalesced": lambda group, short, long: group.allgather_into_tensor_coalesced(long, short),
    "reduce_scatter_tensor_coalesced": lambda group, short, long: group.reduce_scatter_tensor_coalesced(short, long),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", COALESCED)
def test_unequal_numbers_of_tensors_coalesced(operation: str, new_group, world) -> None:
    """What rank 0 has no tensor for meets its next call, and all are told of the two."""
    group, count = new_group(None), 2 if world.rank else 1
    short, long = ([torch.ones(length) for _ in range(count)] for length in (2, 2 * world.size))
    with pytest.raises((dist.DistBackendError, ValueError), match="barrier"):
        COALESCED[operation](group, short, long).wait()
        assert world.rank == 0, "the second operation came through"
        group.barrier().wait()
