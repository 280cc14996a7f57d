"""The process groups that the tests talk in, made once per session and in one order by all ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import inside
import pytest
import torch
import torch.distributed as dist
from patience import patient

from torchmpi_plugin import Options, settings
from torchmpi_plugin.mpi import runtime
from torchmpi_plugin.node import node

T = TypeVar("T")

# The environment of a rank, as MPI has not started when this is read.
RANKS = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
BACKEND = "mpiplus"
#: The API mode (docs/api-modes.md): all groups have the same.
API_MODE = os.environ.get("MPIPLUS_TEST_API_MODE", "direct")
GROUP_TIMEOUT = timedelta(seconds=patient(30))
# Older torch sorts a new group's ranks always, newer torch unless told otherwise.
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def pretend_hosts() -> None:
    """``MPIPLUS_TEST_HOST_OF=0,0,1``: the ranks believe to be on these nodes, in turn, and cannot see the others'."""
    if hosts := os.environ.get("MPIPLUS_TEST_HOST_OF"):
        names = hosts.split(",")
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
        node.identity = lambda: f"node {names[rank % len(names)]}"


def on_gloo(channel: Any, compute: Callable[[Any], T], seconds: float = 30) -> T:
    """What ``compute(group)`` gives on a group of gloo's with a short timeout; if it fails, on all ranks."""
    group, error = dist.new_group(backend="gloo", timeout=timedelta(seconds=patient(seconds))), ""
    try:
        result = compute(group)
    except RuntimeError as problem:
        error = str(problem)
    errors = channel.allgather(error)
    dist.destroy_process_group(group)
    assert not any(errors), f"gloo failed: {errors}"
    return result


def new_group(ranks: list[int] | None, timeout: timedelta = GROUP_TIMEOUT, **options: Any) -> Any:
    """``dist.new_group`` with a timeout that may be short: on a busy machine making the group may need longer."""
    group = dist.new_group(ranks, timeout=max(timeout, GROUP_TIMEOUT), **options)
    if timeout < GROUP_TIMEOUT and group != dist.GroupMember.NON_GROUP_MEMBER:
        inside.set_timeout(group, timeout)
    return group


def assert_usable(group: Any = None) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size(group)] * 3


@contextmanager
def moved_by(mover: str) -> Iterator[None]:
    """Who moves the data of this rank's asynchronous calls, as ``MPIPLUS_ASYNC_PROGRESS`` has it."""
    lib, usual = runtime.shim().lib, settings.ASYNC_PROGRESS.value()
    share = len(os.sched_getaffinity(0)) / RANKS
    lib.mpp_set_inline(settings.PROGRESS_OF.index(mover), share)
    try:
        yield
    finally:
        lib.mpp_set_inline(settings.PROGRESS_OF.index(usual), share)


def only_up_to(ranks: int) -> pytest.MarkDecorator:
    """For tests that take long on many ranks, and are no different there."""
    return pytest.mark.skipif(ranks < RANKS, reason=f"slow, and no different on more than {ranks} ranks")


@dataclass(frozen=True)
class Group:
    """A group as one of its members sees it.

    `ranks` are global ranks in group order; `rank` is this process's place in it.
    """

    family: str
    process_group: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{self.family}{list(self.ranks)}"


def families(world: int) -> dict[str, list[list[int]]]:
    """Named sets of groups that share no rank: the groups of one family are used at the same time.

    The families overlap one another, and `reversed` orders its ranks against MPI's order.
    """
    ranks = list(range(world))
    named = {
        "reversed": [ranks[::-1]],
        "even_odd": [ranks[::2], ranks[1::2]],
        "alone": [[rank] for rank in ranks],
        "all_but_last": [ranks[:-1]],
        "all_but_first": [ranks[1:]],
        "rotated": [ranks[2:] + ranks[:2]],
    }
    return {name: [group for group in groups if group] for name, groups in named.items()}


def new_group_in_order(ranks: list[int], timeout: timedelta) -> Any:
    """A group whose ranks are in the given order, as far as this torch lets one have it."""
    if KEEPS_ORDER:
        return dist.new_group(ranks, timeout=timeout, sort_ranks=False, pg_options=Options(api_mode=API_MODE))
    ranks.sort()
    return dist.new_group(ranks, timeout=timeout, pg_options=Options(api_mode=API_MODE))


def make_groups(timeout: timedelta = GROUP_TIMEOUT) -> dict[str, Group]:
    """This rank's group in the world and in every family that has one for it."""
    me, world = dist.get_rank(), dist.get_world_size()
    mine = {"world": Group("world", dist.group.WORLD, tuple(range(world)), me)}
    for family, members in families(world).items():
        for ranks in members:
            process_group = new_group_in_order(ranks, timeout)
            if me in ranks:
                mine[family] = Group(family, process_group, tuple(ranks), ranks.index(me))
    return mine
