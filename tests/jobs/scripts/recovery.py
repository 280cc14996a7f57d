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
    with raises(dist.DistBackendError, "rank 0 of the world, may have ended"):
        torchmpi_plugin.shrink(group)
    torchmpi_plugin.shrink()
    check_works()


run({"subgroup": subgroup, "store_is_gone": store_is_gone})
