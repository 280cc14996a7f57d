"""The ranks that a helper talks with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import before_init


def find_root(rank: int, ranks: list[int]) -> int:
    """The member that ``rank`` means; 0, every helper's default, is the first where 0 is no member.

    Raises:
        ValueError: no such member.
    """
    if rank in ranks:
        return rank
    if rank == 0:
        return ranks[0]
    raise ValueError(f"rank {rank} is not in the group, whose global ranks are {ranks}")


class Members(NamedTuple):
    """A group seen from one of its members."""

    group: Any  # torch's group; None: this process is alone
    ranks: list[int]  # the members' global ranks, in the group's order
    me: int  # this process's place in ranks

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.ranks[self.me]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """The device that a tensor must be on which this group sends."""
        types = [pair.partition(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
        return torch.device("cpu" if "cpu" in types else types[0])


def initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_outside(group: object) -> bool:
    """Return whether ``group`` is what torch gives to those who are not in a group."""
    return group == dist.GroupMember.NON_GROUP_MEMBER


def find(group: dist.ProcessGroup | None, doing: str) -> Members:
    """The group's members; where this process is alone, it is rank 0 of itself.

    Raises:
        RuntimeError: the job has several processes, but no group was initialised.
        ValueError: this process is not a member.
    """
    if not initialized():
        here = before_init.find()
        if here.size == 1:
            return Members(None, [0], 0)
        raise RuntimeError(
            f"{doing}: this is process {here.rank} of {here.size}, but no process group is initialised; call "
            f"torchmpi_plugin.dist.initialize_dist() first"
        )
    if is_outside(group):
        raise ValueError(f"{doing}: this process (rank {dist.get_rank()}) is not a member of the group")
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return Members(found, dist.get_process_group_ranks(found), dist.get_rank(found))
