"""What a group says that it costs is what it takes."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.distributed as dist
from groups import only_up_to

from torchmpi_plugin.communicator import shared_memory
from torchmpi_plugin.mpi import runtime
from torchmpi_plugin.node import node

pytestmark = only_up_to(3)
LONG = 1 << 20
#: malloc gives a few bytes more here than there.
OF_MALLOC = 512


@pytest.fixture
def own_collectives(monkeypatch) -> None:
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "own")


def lines_about(caplog, label: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if label in record.getMessage()]


def test_one_line_for_a_group(world, new_group, caplog, own_collectives) -> None:
    with caplog.at_level(logging.INFO, "torchmpi_plugin"):
        group = new_group(None)
    (line,) = lines_about(caplog, group.label)
    assert re.search(rf"rank {world.rank} of {world.size} on \d nodes?, shared memory", line)
    assert str(group.communicator.footprint) in line


@pytest.mark.parametrize("hosts", [1, 2])
def test_as_it_was_told_before(world, new_group, monkeypatch, own_collectives, hosts: int) -> None:
    """By `mpiplus info --job`: at once, and once a long operation has gone between the nodes."""
    names = [f"node {rank % hosts}" for rank in range(world.size)]
    monkeypatch.setattr(node, "identity", lambda: names[world.rank])
    group = new_group(None)
    places, shim = node.places(names), runtime.shim()
    told = shared_memory.of_layout(shim.lib, shim.ffi, places)[places[world.rank].node_rank]
    found = group.communicator.footprint
    assert (found.segment, found.later) == (told.segment, told.later)
    assert found.own == pytest.approx(told.own, abs=OF_MALLOC)
    assert (told.later > 0) == (hosts > 1 and world.size > 1)
    data = torch.ones(LONG)
    dist.all_reduce(data, group=group)
    assert data[-1] == world.size
    taken = group.communicator.footprint
    assert taken.later == 0
    assert taken.own == pytest.approx(told.own + told.later, rel=0.01, abs=OF_MALLOC)
