"""What a group says of itself agrees with docs/features.md, which says from which torch on a feature works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from torchmpi_plugin.api.backend import group_of
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


def test_capability() -> None:
    devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
    assert dist.Backend.backend_capability["mpiplus"] == devices
    assert works_here("CPU tensors")
