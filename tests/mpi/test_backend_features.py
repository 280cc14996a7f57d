"""What a group says of itself agrees with docs/features.md, which says from which torch on a feature works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

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


def test_capability() -> None:
    devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
    assert dist.Backend.backend_capability["mpiplus"] == devices
    assert works_here("CPU tensors")
