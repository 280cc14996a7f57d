"""The groups that the helpers of torchmpi_plugin.dist are tried in: mpiplus and gloo, with and without rank 0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import groups
import pytest
import torch.distributed as dist

from torchmpi_plugin.errors import RankFailedError

FAMILIES = ("world", "reversed", "without rank 0", "gloo without rank 0")
in_each_group = pytest.mark.parametrize("family", FAMILIES)


@dataclass(frozen=True)
class Talk:
    """A group, or None for the default one, as a member sees it."""

    group: Any
    ranks: list[int]

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank()

    @property
    def place(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)


def _in_order(ranks: list[int]) -> Any:
    return groups.new_group_in_order(list(ranks), groups.GROUP_TIMEOUT)


def _gloo(ranks: list[int]) -> Any:
    return dist.new_group(ranks, timeout=groups.GROUP_TIMEOUT, backend="gloo")


@functools.cache
def talks() -> dict[str, Talk]:
    """This rank's groups; all ranks make them, in one order.

    The rank that is left out of a group has one of its own: all ranks must pass the same tests.
    """
    everybody = list(range(dist.get_world_size()))
    apart = [ranks for ranks in (everybody[:1], everybody[1:]) if ranks]
    wanted: dict[str, tuple[list[list[int]], Callable[[list[int]], Any]]] = {
        "reversed": ([everybody[::-1]], _in_order),
        "without rank 0": (apart, _in_order),
        "gloo without rank 0": (apart, _gloo),
    }
    mine = {"world": Talk(None, everybody)}
    for family, (parts, make) in wanted.items():
        for ranks in parts:
            group = make(ranks)
            if dist.get_rank() in ranks:
                mine[family] = Talk(group, dist.get_process_group_ranks(group))
    return mine


@pytest.fixture(name="talk")
def talk_of_family(world, family) -> Talk:
    """This rank's group of the family."""
    return talks()[family]


def expect_failure(failing: int, words: str, call: Callable[[], Any]) -> RankFailedError:
    """Every rank raises, and says who has failed and why."""
    with pytest.raises(RankFailedError) as caught:
        call()
    assert caught.value.rank == failing
    assert caught.value.ranks == [failing]
    assert f"rank {failing}" in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.node
    return caught.value
