"""Operations on tensors that lie in each other's memory: as if all inputs were read before any result is written, and
results were written in the order of their list.

Each case is drawn from a seed, for each rank another layout within one storage; and every rank works out what all of
them have. The seed is where the dice begin.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import inside
import pytest
import sampling
import torch
import torch.distributed as dist
from collectives import COLLECTIVES, Call, Collective, Everyone
from groups import API_MODE
from method_calls import options
from placements import PLACEMENTS, Placed
from started import works_of
from torch.distributed import distributed_c10d as c10d

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.skipif(API_MODE != "direct", reason="asks the group itself"),
    pytest.mark.timeout(900),
]
SEED = sampling.seed()
CASES = sampling.count(4000, 80)
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

    def views(self, lengths: Sequence[int], near: Views) -> Views:
        """Side by side, or anywhere."""
        if lengths and len(set(lengths)) == 1 and self.dice.random() < 0.3:
            return list(self.view(sum(lengths), near, flat=True).view(len(lengths), lengths[0]))
        return [self.view(length, near) for length in lengths]


def several_gathered(call: Call) -> Any:
    half = len(call.taken) // 2
    how = options(c10d.AllgatherOptions, asyncOp=call.is_async)
    return call.group.allgather([call.taken[:half], call.taken[half:]], call.given, how)


def two(size: int) -> list[int]:
    return [0, 1]


#: Those in which tensors can lie in each other's memory.
KINDS = {
    **{name: row for name, row in COLLECTIVES.items() if not (row.stacked or (row.given(1) == [0] and row.in_place))},
    "reduce_scatter of uneven lists": replace(COLLECTIVES["reduce_scatter"], rows=lambda rows, rank, slot: rows + slot),
    "all_reduce of several tensors": Collective(
        lambda c: c.group.allreduce(c.taken, options(c10d.AllreduceOptions, asyncOp=c.is_async)),
        lambda sees: [sees.total(0) + sees.total(1)] * 2,
        two,
        in_place=True,
    ),
    "all_gather of several tensors": Collective(
        several_gathered, lambda sees: [sees.of(rank, slot) for rank in range(sees.size) for slot in (0, 1)] * 2, two
    ),
}
#: Only with tensors of one dimension: the first one is cut up.
FLAT = [name for name in KINDS if "all_to_all_single" in name or "several" in name]


def draw(row: Collective, dice: random.Random, sees: Everyone, count: int, flat: bool) -> Rank:
    """Of zeros, which have the lengths that there will be."""
    given, taken = ([tensor.numel() for tensor in of(sees)] for of in (row.all_given, row.all_taken))
    layout = Layout(dice, sees.rank, max(dice.choice((2, 4)) * sees.size * count, sum(given), sum(taken), 24), flat)
    read = layout.views(given, [])
    return Rank(layout.storage, read, read if row.in_place else layout.views(taken, read))


def blocks_of(row: Collective, rank: int, size: int, count: int, tensors: Views) -> dict[int, torch.Tensor]:
    """Copies, by slot."""
    found = {}
    for slots, tensor in zip(row.given(size), tensors, strict=False):
        each = [slots] if isinstance(slots, int) else list(slots)
        lengths = [torch.Size(row.shape((count,), rank, slot)).numel() for slot in each]
        # In one dimension, as a transposed matrix has its elements in the order of its rows.
        copy = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        found |= dict(zip(each, copy.split(lengths), strict=True))
    return found


def run_case(name: str, number: int, group: Any) -> str:
    """What is wrong with one case."""
    row, rank, size = KINDS[name], dist.get_rank(group), dist.get_world_size(group)
    common = random.Random(f"{SEED} {name} {number}")
    root, count = common.randrange(size), common.choice(LONG if common.random() < 0.1 else SHORT)
    asynchronous, paths = common.random() < 0.5, [common.random() < 0.5 for _ in range(size)]
    everybody, blocks = [], []
    for each in range(size):
        dice = random.Random(f"{SEED} {name} {number} {each}")
        sees = Everyone(lambda r, s: torch.zeros(row.shape((count,), r, s), dtype=torch.int64), each, size, root)
        everybody.append(draw(row, dice, sees, count, name in FLAT))
        blocks.append(blocks_of(row, each, size, count, everybody[each].inputs))
    me, sees = everybody[rank], Everyone(lambda r, s: blocks[r][s], rank, size, root)
    wanted = me.storage.clone()
    for output, found in zip(me.outputs, row.all_taken(sees), strict=True):
        wanted.as_strided(output.shape, output.stride(), output.storage_offset()).copy_(found.view(output.shape))
    with inside.through_python(group, paths[rank]):
        call = Call(sees, me.inputs, me.outputs, dist.ReduceOp.SUM, group, asynchronous)
        for work in works_of(row.call(call)):
            work.wait()
    if torch.equal(me.storage, wanted):
        return ""
    places = [(view.storage_offset(), tuple(view.shape), view.stride()) for view in (*me.inputs, *me.outputs)]
    return f"case {number} of seed {SEED}, rank {rank}: root {root}, {asynchronous=}, views {places}"


@pytest.mark.cases(4)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", KINDS)
def test_random_overlaps(name: str, placement: str, placed: Placed) -> None:
    group = placed(placement).process_group
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
    assert inside.calls(group).in_c - before == (4 if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else 0)


def test_the_same_twice_through_python_is_copied_once(group, world) -> None:
    """all_reduce_coalesced of [t, t], as PyTorch's own tests have it: each element is added once."""
    tensor = torch.full((5,), world.rank + 1.0)
    dist.all_reduce_coalesced([tensor, tensor, tensor[1:]], group=group)
    assert tensor.tolist() == [world.size * (world.size + 1) / 2] * 5
