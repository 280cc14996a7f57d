"""Pretended nodes, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network import Hosts, hosts, missing


@pytest.fixture
def nodes_can_be_made() -> None:
    if reason := missing():
        pytest.skip(f"no nodes can be made here: {reason}")


@pytest.fixture
def two_hosts(nodes_can_be_made, tmp_path) -> Iterator[Hosts]:
    """Two nodes on one network."""
    with hosts(2, tmp_path) as made:
        yield made


@pytest.fixture
def three_hosts(nodes_can_be_made, tmp_path) -> Iterator[Hosts]:
    with hosts(3, tmp_path) as made:
        yield made
