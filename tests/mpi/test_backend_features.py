"""What a group says of itself agrees with docs/features.md, which says from which torch on a feature works."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from torchmpi_plugin.api.backend import group_of
from torchmpi_plugin.group import world as job
from torchmpi_plugin.group.process_group import ProcessGroupMPI

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def works_here(feature: str) -> bool:
    since = re.search(rf"^\| {re.escape(feature)} \| (\S+) \|", PAGE.read_text(), re.M)
    assert since is not None, f"{PAGE.name} has no line {feature}"
    return Version(torch.__version__) >= Version(since[1])


@pytest.mark.parametrize(
    ("attribute", "feature"),
    [
        ("supports_coalescing", "coalesced operations"),
        ("supports_splitting", "`split_group`"),
        ("supports_window", "windows"),
    ],
)
def test_attributes(group, attribute: str, feature: str) -> None:
    backend = group if hasattr(group, attribute) else group._get_backend(torch.device("cpu"))
    if attribute == "supports_window" and type(group) is dist.ProcessGroup:
        return  # torch passes it on to no backend in Python
    assert getattr(backend, attribute) == works_here(feature)


def test_a_part_of_a_group_is_one(new_group, world) -> None:
    whole = group_of(new_group(None))
    part, tensor = whole.split_group(list(reversed(range(world.size)))), torch.ones(3)
    assert type(part) is ProcessGroupMPI and part.rank() == world.size - 1 - world.rank
    part.allreduce([tensor]).wait()
    assert tensor.tolist() == [world.size] * 3
    part.shutdown()


def merged(group: ProcessGroupMPI, size: int, **named: object) -> Any:
    store = dist.PrefixStore(f"merging/{group.group_name}", dist.group.WORLD.get_group_store())
    alone = group.split_group([group.rank()])
    try:
        return alone.merge_remote_group(store, size, **named)
    finally:
        alone.shutdown()


def test_groups_are_merged(new_group, world) -> None:
    """In the order in which they come; more than once over one store."""
    whole = group_of(new_group(None))
    for turn in range(2):
        group, ranks = merged(whole, world.size, group_name=f"merged {turn}"), torch.zeros(world.size)
        ranks[group.rank()] = world.rank + 1
        group.allreduce([ranks]).wait()
        assert sorted(ranks.tolist()) == [*range(1, world.size + 1)]
        assert [group.global_rank(rank) + 1 for rank in range(world.size)] == ranks.tolist()
        assert group.group_name == f"merged {turn}" and group.group_desc.endswith(":merge")
        group.shutdown()


def test_what_is_not_merged(new_group, world, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = group_of(new_group(None))
    with pytest.raises(ValueError, match="the size must be 1 or more, not 0"):
        merged(whole, 0)
    if world.size > 1:
        monkeypatch.setattr(job.checkin, "name", f"job {min(world.rank, 1)}")
        with pytest.raises(dist.DistBackendError, match=f"{world.size} processes are of 2 MPI jobs"):
            merged(whole, world.size)
    whole.barrier().wait()
    if world.rank == 0:
        with pytest.raises(dist.DistBackendError, match=f"rank 0 of {world.size + 1} gave up .* did not come"):
            merged(whole, world.size + 1, timeout=timedelta(seconds=1))


def test_capability() -> None:
    devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
    assert dist.Backend.backend_capability["mpiplus"] == devices
    assert works_here("CPU tensors")
