"""Whose collectives a group has, mpiplus's own or the MPI library's: as its rank 0 was asked."""

from __future__ import annotations

import errno

import pytest
import torch
import torch.distributed as dist

from torchmpi_plugin import Options
from torchmpi_plugin.communicator import communicator, shared_memory
from torchmpi_plugin.communicator.wishes import Wishes
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
    monkeypatch.setattr(shared_memory, "MOST_NODES", 1)
    monkeypatch.setattr(node, "identity", lambda: f"host {world.rank % 2}")
    check(new_group(None, pg_options=Options(collectives=wanted)), wanted == "own")


@pytest.mark.parametrize("by", ["option", "variable"])
def test_reproducible_sums_are_ours(world, new_group, monkeypatch, by: str) -> None:
    """Also on more nodes than MPI's collectives are for; as rank 0 has it."""
    monkeypatch.setenv("MPIPLUS_SHM", "1")
    monkeypatch.setenv("MPIPLUS_REPRODUCIBLE", "1" if by == "variable" and world.rank == 0 else "0")
    monkeypatch.setattr(shared_memory, "MOST_NODES", 1)
    monkeypatch.setattr(node, "identity", lambda: f"host {world.rank % 2}")
    asked = True if by == "option" and world.rank == 0 else None
    group = new_group(None, pg_options=Options(reproducible=asked))
    check(group, True)
    assert group._communicator.wishes == Wishes("own", True)


@pytest.mark.parametrize(("option", "variables", "named"), [
    ({"collectives": "mpi"}, {}, r"Options\(collectives='mpi'\)"),
    ({}, {"MPIPLUS_COLLECTIVES": "mpi"}, "MPIPLUS_COLLECTIVES=mpi"),
    ({}, {"MPIPLUS_SHM": "0"}, "MPIPLUS_SHM=0"),
    ({"collectives": "own"}, {"MPIPLUS_SHM": "0"}, "MPIPLUS_SHM=0"),
])  # fmt: skip
@pytest.mark.parametrize("by", ["option", "variable"])
def test_reproducible_sums_of_mpi(world, monkeypatch, option, variables, named: str, by: str) -> None:
    """An error on each rank that is asked for both, before it goes to the others."""
    for name, value in {"MPIPLUS_SHM": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MPIPLUS_REPRODUCIBLE", str(int(by == "variable")))
    asked = True if by == "option" else None
    with pytest.raises(ValueError, match=f"{named} and reproducible sums exclude each other"):
        dist.new_group(None, pg_options=Options(reproducible=asked, **option))


def test_an_option_comes_before_the_variable(world, new_group, monkeypatch) -> None:
    monkeypatch.setenv("MPIPLUS_SHM", "1")
    monkeypatch.setenv("MPIPLUS_REPRODUCIBLE", "1")
    check(new_group(None, pg_options=Options(reproducible=False, collectives="mpi")), False)


def test_reproducible_sums_without_shared_memory(world, new_group, monkeypatch) -> None:
    """No group rather than one with other sums; the next one is made as if nothing had been."""

    def full(size: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("MPIPLUS_SHM", "1")
    with monkeypatch.context() as patched:
        patched.setattr(communicator, "create_file", full)
        with pytest.raises(dist.DistBackendError, match=r"No space left on device.*reproducible"):
            dist.new_group(None, pg_options=Options(reproducible=True))
    check(new_group(None, pg_options=Options(reproducible=True)), True)


def test_a_group_split_off_has_the_wishes_of_its_parent(world, new_group, monkeypatch) -> None:
    monkeypatch.setenv("MPIPLUS_SHM", "1")
    parent = new_group(None, pg_options=Options(reproducible=True))
    part = parent.part(dist.PrefixStore("wishes/", parent._store), list(range(world.size)), "wishes", None)
    assert part._communicator.wishes == Wishes("own", True)
    dist.barrier(group=parent)
    part._communicator.free()


def test_another_word() -> None:
    with pytest.raises(ValueError, match=r"'auto', 'own' or 'mpi', not 'nccl'"):
        Options(collectives="nccl")
    with pytest.raises(TypeError, match="True, False or None, not 'yes'"):
        Options(reproducible="yes")
