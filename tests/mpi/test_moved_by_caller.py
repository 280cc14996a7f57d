"""Asynchronous calls that move their data themselves: complete when they return, where the others come in time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import RANKS, moved_by
from placements import ORDERED, Placed

from torchmpi_plugin.engine.work import Work

BLOCK = 30_000  # elements: too long to be sent before its receiver comes
#: What is called, on blocks of which each rank has one.
CALLS: dict[str, Callable[[torch.Tensor, Any], dist.Work]] = {
    "all_reduce": lambda blocks, group: dist.all_reduce(blocks, group=group, async_op=True),
    "all_to_all": lambda blocks, group: dist.all_to_all_single(
        torch.empty_like(blocks), blocks.clone(), group=group, async_op=True
    ),
    "gather": lambda blocks, group: dist.gather(
        blocks[0], list(blocks.clone()) if dist.get_rank() == 0 else None, 0, group=group, async_op=True
    ),
    "scatter": lambda blocks, group: dist.scatter(
        torch.empty_like(blocks[0]), list(blocks) if dist.get_rank() == 0 else None, 0, group=group, async_op=True
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif((os.cpu_count() or 1) < RANKS, reason="with more ranks than cores some always come too late")
@pytest.mark.parametrize("placement", ORDERED)
@pytest.mark.parametrize("name", CALLS)
def test_complete_at_once(name: str, placement: str, world, placed: Placed, channel) -> None:
    """Sooner or later on every rank: on a busy machine others may often come too late."""
    group, seen = placed(placement).process_group, False
    with moved_by("caller"):
        while not all(channel.allgather(seen)):
            work = CALLS[name](torch.ones(world.size, BLOCK), group)
            seen |= type(work) is Work
            work.wait()
