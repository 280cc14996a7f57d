"""Operations on tensors that lie in each other's memory: as if all inputs were read before any result is written, and
results were written in the order of their list.

Each case is drawn from a seed, for each rank another layout within one storage; and every rank works out what all of
them have. The seed is where the dice begin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import inside
import pytest
import sampling
import torch
import torch.distributed as dist
from groups import API_MODE
from method_calls import options
from placements import PLACEMENTS, group_placed
from torch.distributed import distributed_c10d as c10d

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.skipif(API_MODE != "direct", reason="asks the group itself"),
    pytest.mark.timeout(900),
]
SEED = sampling.seed()
CASES = sampling.count("overlaps: cases of each operation", 4000, 80)
#: Elements: in one slot, and in several, of shared memory.
SHORT, LONG = (0, 1, 2, 5), (9000,)
Views = list[torch.Tensor]


@dataclass
class Rank:
    """What one rank has, and what becomes of it: views of one storage, which hold different numbers everywhere."""

    storage: torch.Tensor
    inputs: Views
    outputs: Views


class Layout:
    """Draws views of a storage, which often overlap."""

    def __init__(self, dice: random.Random, rank: int, length: int, flat: bool) -> None:
        self.dice, self.flat = dice, flat
        self.length = length
        self.storage = torch.arange(length) + 1_000_000 * (rank + 1)

    def view(self, count: int, near: Views, flat: bool = False) -> torch.Tensor:
        """``count`` elements, perhaps with gaps; perhaps just where one of ``near`` is, or a little farther."""
        step = self.dice.choice((1, 1, 1, 2))
        begin = self.dice.randrange(self.length)
        if near and self.dice.random() < 0.6:
            step = 1
            begin = self.dice.choice(near).storage_offset() + self.dice.choice((0, 0, 0, 1, -1, count, count // 2))
        if count * step > self.length:
            step = 1
        begin = min(max(begin, 0), self.length - count * step)
        if count > 1 and count % 2 == 0 and not (flat or self.flat) and self.dice.random() < 0.2:  # a transposed matrix
            return self.storage.as_strided((2, count // 2), (step, 2 * step), begin)
        return self.storage[begin : begin + count * step : step]

    def views(self, number: int, count: int, near: Views, lengths: Sequence[int] = ()) -> Views:
        """Side by side, or anywhere; of ``lengths``, if these are given."""
        if lengths:
            return [self.view(length, near) for length in lengths]
        if self.dice.random() < 0.3:
            together = self.view(number * count, near, flat=True)
            return [together[at * count : (at + 1) * count] for at in range(number)]
        return [self.view(count, near) for _ in range(number)]


@dataclass(frozen=True)
class Kind:
    """An operation.

    Attributes:
        inputs, outputs: how many tensors of how many times the count a rank has, for a group's size.
        start: begins it; takes this rank's part, the group, the root and ``async_op``.
        wanted: the results of one rank, from all ranks' inputs, which are copies; takes the rank and the root.
    """

    inputs: Callable[[int], tuple[int, int]]
    outputs: Callable[[int], tuple[int, int]]
    start: Callable[[Rank, Any, int, bool], Any]
    wanted: Callable[[list[Views], int, int], Views]
    rooted: str = ""  # what only the root has
    in_place: bool = False
    #: Elements of each input and output, where they differ: of a rank, the group's size and the count.
    uneven: Callable[[int, int, int], tuple[list[int], list[int]]] | None = None
    flat: bool = False  # only tensors of one dimension: the first one is cut up


def one(size: int) -> tuple[int, int]:
    return 1, 1


def each(size: int) -> tuple[int, int]:
    return size, 1


def whole(size: int) -> tuple[int, int]:
    return 1, size


def two(size: int) -> tuple[int, int]:
    return 2, 1


def two_wholes(size: int) -> tuple[int, int]:
    return 2, size


def block(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.view(size, -1)[rank]


def parts(size: int, count: int) -> list[int]:
    """What a rank sends to itself, to the next, and so on: not the same, and ``size * count`` in all."""
    return [2 * count, 0, *([count] * (size - 2))] if size > 1 else [count]


def sent(rank: int, size: int, count: int) -> list[int]:
    """To each rank."""
    return [parts(size, count)[(other - rank) % size] for other in range(size)]


def received(rank: int, size: int, count: int) -> list[int]:
    """From each rank."""
    return [parts(size, count)[(rank - other) % size] for other in range(size)]


def growing(size: int, count: int) -> list[int]:
    return [count + other for other in range(size)]


def exchange_with_splits(me: Rank, group: Any, root: int, asynchronous: bool) -> Any:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    splits = [of(rank, size, me.inputs[0].numel() // size) for of in (received, sent)]
    return dist.all_to_all_single(me.outputs[0], me.inputs[0], *splits, group=group, async_op=asynchronous)


def exchanged(every: list[Views], rank: int, root: int) -> Views:
    size = len(every)
    count = every[0][0].numel() // size
    return [torch.cat([inputs[0].split(sent(other, size, count))[rank] for other, inputs in enumerate(every)])]


def several_reduced(me: Rank, group: Any, root: int, asynchronous: bool) -> Any:
    return group.allreduce(me.outputs, options(c10d.AllreduceOptions, asyncOp=asynchronous))


def several_gathered(me: Rank, group: Any, root: int, asynchronous: bool) -> Any:
    half = len(me.outputs) // 2
    lists = [me.outputs[:half], me.outputs[half:]]
    return group.allgather(lists, me.inputs, options(c10d.AllgatherOptions, asyncOp=asynchronous))


def coalesced_gather(me: Rank, group: Any, root: int, asynchronous: bool) -> Any:
    return group.all_gather_single_coalesced(
        me.outputs, me.inputs, options(c10d.AllgatherOptions, asyncOp=asynchronous)
    )


def coalesced_lists(me: Rank, group: Any, root: int, asynchronous: bool) -> Any:
    lists = [me.outputs[at : at + 2] for at in range(0, len(me.outputs), 2)]
    return group.allgather_coalesced(lists, me.inputs, options(c10d.AllgatherOptions, asyncOp=asynchronous))


def coalesced_scatter(me: Rank, group: Any, root: int, asynchronous: bool) -> Any:
    return group.reduce_scatter_single_coalesced(
        me.outputs, me.inputs, options(c10d.ReduceScatterOptions, asyncOp=asynchronous)
    )


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


KINDS = {
    "all_gather": Kind(
        one, each, lambda me, g, root, a: dist.all_gather(me.outputs, me.inputs[0], group=g, async_op=a),
        lambda every, rank, root: [inputs[0] for inputs in every],
    ),
    "all_gather_into_tensor": Kind(
        one, whole, lambda me, g, root, a: dist.all_gather_into_tensor(
            me.outputs[0], me.inputs[0], group=g, async_op=a),
        lambda every, rank, root: [torch.cat([inputs[0] for inputs in every])],
    ),
    "gather": Kind(
        one, each, lambda me, g, root, a: dist.gather(
            me.inputs[0], me.outputs or None, group=g, group_dst=root, async_op=a),
        lambda every, rank, root: [inputs[0] for inputs in every], rooted="outputs",
    ),
    "scatter": Kind(
        each, one, lambda me, g, root, a: dist.scatter(
            me.outputs[0], me.inputs or None, group=g, group_src=root, async_op=a),
        lambda every, rank, root: [every[root][rank]], rooted="inputs",
    ),
    "all_to_all": Kind(
        each, each, lambda me, g, root, a: dist.all_to_all(me.outputs, me.inputs, group=g, async_op=a),
        lambda every, rank, root: [inputs[rank] for inputs in every],
    ),
    "all_to_all_single": Kind(
        whole, whole, lambda me, g, root, a: dist.all_to_all_single(me.outputs[0], me.inputs[0], group=g, async_op=a),
        lambda every, rank, root: [torch.cat([block(inputs[0], rank, len(every)) for inputs in every])], flat=True,
    ),
    "reduce_scatter": Kind(
        each, one, lambda me, g, root, a: dist.reduce_scatter(me.outputs[0], me.inputs, group=g, async_op=a),
        lambda every, rank, root: [total([inputs[rank] for inputs in every])],
    ),
    "reduce_scatter_tensor": Kind(
        whole, one, lambda me, g, root, a: dist.reduce_scatter_tensor(me.outputs[0], me.inputs[0], group=g, async_op=a),
        lambda every, rank, root: [total([block(inputs[0], rank, len(every)) for inputs in every])],
    ),
    "all_reduce_coalesced": Kind(
        each, each, lambda me, g, root, a: dist.all_reduce_coalesced(me.outputs, group=g, async_op=a),
        lambda every, rank, root: [total(column) for column in zip(*every, strict=True)], in_place=True,
    ),
    "all_gather_into_tensor_coalesced": Kind(
        two, two_wholes, coalesced_gather,
        lambda every, rank, root: [torch.cat(column) for column in zip(*every, strict=True)],
    ),
    "all_gather_coalesced": Kind(
        two, lambda size: (2 * size, 1), coalesced_lists,
        lambda every, rank, root: [tensor for inputs in every for tensor in inputs],
    ),
    "reduce_scatter_tensor_coalesced": Kind(
        two_wholes, two, coalesced_scatter,
        lambda every, rank, root: [
            total([block(tensor, rank, len(every)) for tensor in column]) for column in zip(*every, strict=True)],
    ),
    "all_to_all_single with splits": Kind(whole, whole, exchange_with_splits, exchanged, flat=True),
    "all_to_all of uneven lists": Kind(
        each, each, lambda me, g, root, a: dist.all_to_all(me.outputs, me.inputs, group=g, async_op=a),
        lambda every, rank, root: [inputs[rank] for inputs in every],
        uneven=lambda rank, size, count: (sent(rank, size, count), received(rank, size, count)),
    ),
    "all_gather of uneven lists": Kind(
        one, each, lambda me, g, root, a: dist.all_gather(me.outputs, me.inputs[0], group=g, async_op=a),
        lambda every, rank, root: [inputs[0] for inputs in every],
        uneven=lambda rank, size, count: ([count + rank], growing(size, count)),
    ),
    "reduce_scatter of uneven lists": Kind(
        each, one, lambda me, g, root, a: dist.reduce_scatter(me.outputs[0], me.inputs, group=g, async_op=a),
        lambda every, rank, root: [total([inputs[rank] for inputs in every])],
        uneven=lambda rank, size, count: (growing(size, count), [count + rank]),
    ),
    "all_reduce of several tensors": Kind(
        two, two, several_reduced,
        lambda every, rank, root: [total([tensor for inputs in every for tensor in inputs])] * 2,
        in_place=True, flat=True,
    ),
    "all_gather of several tensors": Kind(
        two, lambda size: (4 * size, 1), several_gathered,
        lambda every, rank, root: [tensor for inputs in every for tensor in inputs] * 2, flat=True,
    ),
}  # fmt: skip


def draw(kind: Kind, dice: random.Random, rank: int, size: int, count: int, root: int) -> Rank:
    (inputs, input_blocks), (outputs, output_blocks) = kind.inputs(size), kind.outputs(size)
    layout = Layout(dice, rank, max(dice.choice((2, 4)) * size * count, outputs * output_blocks * count, 24), kind.flat)
    given, taken = kind.uneven(rank, size, count) if kind.uneven else ([], [])
    read = layout.views(inputs, input_blocks * count, [], given)
    if kind.in_place:
        return Rank(layout.storage, read, read)
    written = layout.views(outputs, output_blocks * count, read, taken)
    if kind.rooted and rank != root:
        read, written = ([], written) if kind.rooted == "inputs" else (read, [])
    return Rank(layout.storage, read, written)


def run_case(name: str, number: int, group: Any) -> str:
    """What is wrong with one case."""
    kind, rank, size = KINDS[name], dist.get_rank(group), dist.get_world_size(group)
    common = random.Random(f"{SEED} {name} {number}")
    root, count = common.randrange(size), common.choice(LONG if common.random() < 0.1 else SHORT)
    asynchronous, paths = common.random() < 0.5, [common.random() < 0.5 for _ in range(size)]
    everybody = [
        draw(kind, random.Random(f"{SEED} {name} {number} {each}"), each, size, count, root) for each in range(size)
    ]
    me = everybody[rank]
    wanted = Rank(me.storage.clone(), [], [])
    # In one dimension, as a transposed matrix has its elements in the order of its rows.
    every = [[tensor.reshape(-1).clone() for tensor in each.inputs] for each in everybody]
    results = kind.wanted(every, rank, root)
    for output, found in zip(me.outputs, results if me.outputs else [], strict=True):
        wanted.storage.as_strided(output.shape, output.stride(), output.storage_offset()).copy_(
            found.view(output.shape)
        )
    with inside.through_python(group, paths[rank]):
        work = kind.start(me, group, root, asynchronous)
        if work is not None:
            work.wait()
    if torch.equal(me.storage, wanted.storage):
        return ""
    places = [(view.storage_offset(), tuple(view.shape), view.stride()) for view in (*me.inputs, *me.outputs)]
    return f"case {number} of seed {SEED}, rank {rank}: root {root}, {asynchronous=}, views {places}"


@pytest.mark.cases(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", KINDS)
def test_random_overlaps(name: str, placement: str, world, new_group, monkeypatch) -> None:
    group = group_placed(placement, world.rank, new_group, monkeypatch)
    cases = CASES if placement == "one node" else CASES // 3
    problems = [problem for number in range(cases) if (problem := run_case(name, number, group))]
    assert not problems, f"{len(problems)} of {cases}: {problems[:3]}"


# ---- what is common, and must not be copied ----


@pytest.mark.parametrize("count", [3, 20_000])
def test_in_place_needs_no_copy(count: int, group, world, monkeypatch) -> None:
    """This rank's own part as input and result at once: begun in C, which copies nothing first."""
    rank, size = world.rank, world.size
    before = inside.calls(group).in_c
    gathered = torch.full((size, count), -1.0)
    gathered[rank] = rank
    dist.all_gather_into_tensor(gathered, gathered[rank], group=group)
    assert (gathered == torch.arange(float(size))[:, None]).all()
    listed = [torch.full((count,), float(rank)) for _ in range(size)]
    dist.all_gather(listed, listed[rank], group=group)
    assert [tensor[-1].item() for tensor in listed] == list(range(size))
    given = torch.arange(float(size))[:, None].expand(size, count).contiguous()
    dist.reduce_scatter_tensor(given[rank], given, group=group)
    assert (given[rank] == size * rank).all()
    mine = torch.ones(count)
    dist.scatter(mine, [mine] + [torch.ones(count) for _ in range(size - 1)] if rank == 0 else None, group=group)
    assert inside.calls(group).in_c - before == 4


def test_the_same_twice_through_python_is_copied_once(group, world) -> None:
    """all_reduce_coalesced of [t, t], as PyTorch's own tests have it: each element is added once."""
    tensor = torch.full((5,), world.rank + 1.0)
    dist.all_reduce_coalesced([tensor, tensor, tensor[1:]], group=group)
    assert tensor.tolist() == [world.size * (world.size + 1) / 2] * 5
