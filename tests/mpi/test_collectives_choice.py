"""Whose collectives a group has, mpiplus's own or the MPI library's: as its rank 0 was asked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchmpi_plugin import Options
from torchmpi_plugin.communicator import communicator
from torchmpi_plugin.host import node

pytestmark = pytest.mark.mpi(min_size=2)


def check(group: dist.ProcessGroup, own: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((70_001,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert (tensor == size * (size - 1) / 2).all()
    parts = [torch.empty(3, dtype=torch.bfloat16) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank), dtype=torch.bfloat16), group=group)
    assert [part[2].item() for part in parts] == list(range(size))
    assert group._communicator.shares_memory == own


@pytest.mark.parametrize("wanted", ["own", "mpi", "auto"])
def test_an_option(world, new_group, monkeypatch, wanted: str) -> None:
    monkeypatch.setenv("MPIPLUS_SHM", "1")
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi" if wanted == "own" else "own")
    check(new_group(None, pg_options=Options(collectives=wanted)), wanted != "mpi")


@pytest.mark.parametrize("wanted", ["own", "mpi"])
def test_a_variable_of_rank_0(world, new_group, monkeypatch, wanted: str) -> None:
    other = {"own": "mpi", "mpi": "own"}[wanted]
    monkeypatch.setenv("MPIPLUS_SHM", "1")
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", wanted if world.rank == 0 else other)
    check(new_group(None), wanted == "own")


def test_memory_that_may_not_be_shared(world, new_group, monkeypatch) -> None:
    monkeypatch.setenv("MPIPLUS_SHM", "0" if world.rank == 0 else "1")
    check(new_group(None, pg_options=Options(collectives="own")), False)


@pytest.mark.parametrize("wanted", ["auto", "own"])
def test_many_nodes(world, new_group, monkeypatch, wanted: str) -> None:
    monkeypatch.setenv("MPIPLUS_SHM", "1")
    monkeypatch.setattr(communicator, "MOST_NODES", 1)
    monkeypatch.setattr(node, "identity", lambda: f"host {world.rank % 2}")
    check(new_group(None, pg_options=Options(collectives=wanted)), wanted == "own")


def test_another_word() -> None:
    with pytest.raises(ValueError, match=r"'auto', 'own' or 'mpi', not 'nccl'"):
        Options(collectives="nccl")
