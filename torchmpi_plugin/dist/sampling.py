"""The samples that this rank takes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from .queries import get_global_rank, get_world_size


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> DistributedSampler[Any]:
    """torch's DistributedSampler over this job's ranks, before initialisation too. From Composer.

    Args:
        dataset: with a length.
        drop_last: leave samples out so that all ranks have equally many, rather than repeat some.
        shuffle: in a new order each time ``set_epoch`` is called with another number.
        num_replicas: how many ranks share the dataset; the group's size if None.
        rank: this process among them; its rank in the group if None.
        seed: of the shuffle, equal on all ranks.
        group: the ranks that share the dataset; the world if None.

    Example::

        loader = DataLoader(dataset, batch_size=32, sampler=get_sampler(dataset, shuffle=True))
    """
    return DistributedSampler(
        dataset,
        num_replicas=get_world_size(group) if num_replicas is None else num_replicas,
        rank=get_global_rank(group) if rank is None else rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
