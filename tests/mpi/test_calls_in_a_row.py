"""Asynchronous calls of which nobody is waited for: as if each had been over before the next, also on shared memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import moved_by
from placements import A_NODE_EACH, ORDERED, PLACEMENTS, Placed
from sampling import count, dice

LONG = 200_000  # of int64: 24 pieces
ROWS = count(40, 6)
KINDS = ("all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter")


#: Who moves the data, on even ranks and on odd ones: they need not agree.
MOVERS = [("auto", "auto"), ("caller", "caller"), ("background", "caller")]


@pytest.fixture(params=MOVERS, ids=" and ".join)
def movers(request, world) -> Iterator[None]:
    with moved_by(request.param[world.rank % 2]):
        yield


@dataclass(frozen=True)
class Call:
    """On the stretch [begin, end) of a buffer that each rank has; sums wrap around, so they are exact."""

    kind: str
    begin: int
    end: int
    root: int

    def start(self, buffer: torch.Tensor, group: Any) -> dist.Work:
        mine, rank, size = buffer[self.begin : self.end], dist.get_rank(group), dist.get_world_size(group)
        if self.kind == "all_reduce":
            return dist.all_reduce(mine, group=group, async_op=True)
        if self.kind == "broadcast":
            return dist.broadcast(mine, self.root, group=group, async_op=True)
        if self.kind == "barrier":
            return dist.barrier(group=group, async_op=True)
        blocks = self.blocks(mine, size)
        if self.kind == "all_gather":  # in place, as the lists of ZeRO are
            return dist.all_gather_into_tensor(blocks.view(-1), blocks[rank], group=group, async_op=True)
        return dist.reduce_scatter_tensor(blocks[rank], blocks.view(-1), group=group, async_op=True)

    @staticmethod
    def blocks(stretch: torch.Tensor, size: int) -> torch.Tensor:
        return stretch[: len(stretch) // size * size].view(size, -1)

    def simulate(self, buffers: list[torch.Tensor]) -> None:
        stretches, size = [buffer[self.begin : self.end] for buffer in buffers], len(buffers)
        if self.kind == "barrier":
            return
        if self.kind in ("all_reduce", "broadcast"):
            result = sum(stretches) if self.kind == "all_reduce" else stretches[self.root].clone()
            for stretch in stretches:
                stretch.copy_(result)
            return
        before = [self.blocks(stretch, size).clone() for stretch in stretches]
        for rank, stretch in enumerate(stretches):
            blocks = self.blocks(stretch, size)
            for r in range(size):
                if self.kind == "all_gather":
                    blocks[r] = before[r][r]
            if self.kind == "reduce_scatter":
                blocks[rank] = sum(blocks_of[rank] for blocks_of in before)


def random_call(random_numbers: random.Random, size: int) -> Call:
    lengths = (0, 1, 500, 5_000, 9_000, LONG // 2, LONG)
    length = random_numbers.choice(lengths)
    begin = random_numbers.choice((0, random_numbers.randrange(LONG - length + 1)))
    return Call(random_numbers.choice(KINDS), begin, begin + length, random_numbers.randrange(size))


def filled(rank: int) -> torch.Tensor:
    return torch.arange(LONG) * 7 + rank * 1_000_003


@pytest.mark.usefixtures("movers")
@pytest.mark.parametrize("placement", [*ORDERED, A_NODE_EACH])
def test_results_are_those_of_calls_one_by_one(placement: str, world, placed: Placed) -> None:
    """MPI's own nonblocking collectives, like gloo's, go on side by side: there a program has to wait in between."""
    group, random_numbers = placed(placement).process_group, dice("calls in a row")
    for row in range(ROWS):
        calls = [random_call(random_numbers, world.size) for _ in range(8)]
        buffers = [filled(rank) for rank in range(world.size)]
        mine = buffers[world.rank].clone()
        works = [call.start(mine, group) for call in calls]
        for call in calls:
            call.simulate(buffers)
        for work in reversed(works):
            work.wait()
        assert torch.equal(mine, buffers[world.rank]), (row, calls)


@pytest.mark.cases(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("movers")
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_of_them_differs(placement: str, at: int, world, placed: Placed) -> None:
    """That one fails, on every rank and with the ranks' calls in the message; those before and behind it are right."""
    group = placed(placement).process_group
    tensors = [filled(world.rank)[:length].clone() for length in (LONG, 100, LONG, LONG // 2, 9_000)]
    works = []
    for number, tensor in enumerate(tensors):
        if number == at and world.rank == world.size - 1:
            works.append(dist.broadcast(tensor, 0, group=group, async_op=True))
        else:
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        if number == at:
            with pytest.raises(dist.DistBackendError, match=r"ranks disagree.*can be used again"):
                work.wait()
            wanted = filled(world.rank)[: len(tensor)]
        else:
            work.wait()
            wanted = sum(filled(rank)[: len(tensor)] for rank in range(world.size))
        assert torch.equal(tensor, wanted), number
