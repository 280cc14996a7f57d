"""The ranks that a helper talks with; before ``init_process_group`` what is known of this process without that."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..launchers import variables as launchers
from ..launchers.table import OF_SCRIPTS
from ..launchers.variables import number


def find_root(rank: int, ranks: list[int]) -> int:
    """The member that ``rank`` means; 0, every helper's default, is the first where 0 is none. Else a ValueError."""
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
    """Return whether ``group`` is what torch gives to those who are not in a group; TypeError: it is none at all."""
    outside = bool(group == dist.GroupMember.NON_GROUP_MEMBER)
    if not (outside or group is None or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"the group must be a torch.distributed.ProcessGroup, or None for the world, not {group!r}")
    return outside


def find(group: dist.ProcessGroup | None, doing: str) -> Members:
    """The group's members; where this process is alone, it is rank 0 of itself.

    Raises:
        RuntimeError: the job has several processes, but no group was initialised.
        ValueError: this process is not a member.
    """
    if not initialized():
        here = launched()
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


# ---- before init_process_group: looking it up initialises nothing ----


class Launched(NamedTuple):
    """This process among those that were started with it; None where nobody says."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None


def running_mpi() -> Any:
    """``mpi4py.MPI`` if this program has initialised it already, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def _from_variables(environment: Mapping[str, str]) -> Launched:
    launch = launchers.started_by(environment)
    if launch is None:
        return Launched(0, 1, 0, 1, 0)
    names = launchers.variables_of(launch)
    rank = number(environment, names.rank)
    if rank is None:
        if launch.size == 1:
            return Launched(0, 1, 0, 1, 0)
        raise RuntimeError(
            f"{launch.launcher} started {launch.size} processes ({launch.variable}={launch.size}), but which of them "
            f"this is, is unknown: {names.rank} is not set"
        )
    if number(environment, OF_SCRIPTS.size) == launch.size and number(environment, OF_SCRIPTS.rank) == rank:
        names = OF_SCRIPTS  # mpiplus run, or somebody else who knows the nodes, has described this process too
    local_rank, local_size = number(environment, names.local_rank), number(environment, names.local_size)
    return Launched(rank, launch.size, local_rank, local_size, number(environment, *names.node_rank))


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """This process as MPI has it where MPI runs already, else as its launcher's variables say.

    All on one node is recognised by the sizes, and the local rank is then the rank: Open MPI may number the
    processes of a node in another order than everybody else.
    """
    found = _from_variables(environment)
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        known = found.size == size and found.rank == rank
        found = found if known else Launched(rank, size, None, None, None)
    if found.size in (1, found.local_size):
        return Launched(found.rank, found.size, found.rank, found.size, 0)
    return found
