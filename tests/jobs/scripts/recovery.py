"""A rank dies, and the others go on. Needs ULFM."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from steps import ME, check_works, raises, run

import torchmpi_plugin


def subgroup() -> None:
    """Rank 2 dies; a group that it was in is shrunk, the world and a group without it stay as they are."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    with_it, without = dist.new_group([1, 2, 3]), dist.new_group([0, 1])
    dist.barrier()
    if ME == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if ME in (1, 3):
        with raises(torchmpi_plugin.RankFailedError, "has ended|has died") as errors:
            while True:
                dist.all_reduce(torch.ones(3), group=with_it)
        assert errors[0].ranks in ([2], [])  # none where another rank's shrink() woke this one
        group = torchmpi_plugin.shrink(with_it)
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert dist.get_rank() == ME
        check_works(group)
        with raises(ValueError):
            dist.all_reduce(torch.ones(3), group=with_it)
    if ME in (0, 1):
        check_works(without)


def store_is_gone() -> None:
    """Without rank 0's store, a subgroup cannot be replaced; whoever tries is told."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    group = dist.new_group([1, 2])
    dist.barrier()
    if ME == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(torchmpi_plugin.RankFailedError):
        while True:
            dist.all_reduce(torch.ones(3))
    with raises(dist.DistBackendError, "rank 0 of the world, which holds it, may have ended"):
        torchmpi_plugin.shrink(group)
    torchmpi_plugin.shrink()
    check_works()


def shrunk(which: str, end: str) -> None:
    """torch.distributed.shrink_group without rank 2, which is dead, or alive and does not call it."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    # torch 2.15 takes the numbers in the group for those in the world: here they are the same.
    old = dist.new_group([0, 1, 2]) if which == "subgroup" else dist.group.WORLD
    ranks = dist.get_process_group_ranks(old)
    dist.barrier()
    if ME == 2:
        if end == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if end == "dead":
        with raises(torchmpi_plugin.RankFailedError):
            while True:
                dist.all_reduce(torch.ones(3), group=old) if ME in ranks else dist.all_reduce(torch.ones(3))
    if ME in ranks:
        group = dist.shrink_group([ranks.index(2)], group=old, shrink_flags=1 if end == "dead" else 0)
        assert dist.get_world_size(group) == len(ranks) - 1
        check_works(group)


run(globals())
