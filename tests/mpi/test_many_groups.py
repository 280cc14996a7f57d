"""More groups of the same ranks than MPI has communicators: they share one, and nothing else."""

from __future__ import annotations

import groups
import pytest
import torch
import torch.distributed as dist
from groups import assert_usable, only_up_to
from mpi4py import MPI
from patience import patient

import torchmpi_plugin
from torchmpi_plugin.api import public
from torchmpi_plugin.communicator import sharing
from torchmpi_plugin.mpi import runtime

pytestmark = [pytest.mark.mpi(min_size=2), only_up_to(3)]


@pytest.fixture
def shared(world, new_group, monkeypatch):
    """Three groups of all ranks on one communicator."""
    if not runtime.flavour().shares_communicators:
        pytest.skip("Open MPI has enough communicators")
    monkeypatch.setattr(sharing, "MOST_PRIVATE", 0)
    made = [new_group(None) for _ in range(3)]
    assert len({public.resolve(each).communicator.comm.py2f() for each in made}) == 1
    return made


@pytest.mark.timeout(patient(120))
def test_more_than_there_are_communicators(world, new_group) -> None:
    """MPICH has 2,048; all but a few are somebody else's here."""
    held = [MPI.COMM_SELF.Dup() for _ in range(1950)]
    try:
        for turn in range(120):
            tensor = torch.tensor([turn * (dist.get_rank() == 0)])
            dist.broadcast(tensor, 0, group=new_group(None))
            assert tensor.item() == turn
    finally:
        for each in held:
            each.Free()


def test_messages_do_not_meet(shared, world) -> None:
    """Each rank sends to the next by all groups with one tag, and receives in another order."""
    rank, size = world.rank, world.size
    sent = [dist.isend(torch.tensor([number]), (rank + 1) % size, each, 5) for number, each in enumerate(shared)]
    for number in (2, 0, 1):
        tensor = torch.zeros(1, dtype=torch.int64)
        dist.recv(tensor, (rank - 1) % size, shared[number], 5)
        assert tensor.item() == number
    for work in sent:
        work.wait()


def test_exchanges_and_sums_in_any_order(shared, world) -> None:
    order = shared if world.rank % 2 else shared[::-1]
    works, results = [], {}
    for each in order:
        number = shared.index(each)
        outputs = list(torch.zeros(world.size, 3000, dtype=torch.int64))
        inputs = [torch.full((3000,), 10 * number + peer) for peer in range(world.size)]
        total = torch.full((5000,), float(number))
        works += [dist.all_to_all(outputs, inputs, each, True), dist.all_reduce(total, group=each, async_op=True)]
        results[number] = outputs, total
    for work in works:
        work.wait()
    for number, (outputs, total) in results.items():
        assert {int(value) for output in outputs for value in output} == {10 * number + world.rank}
        assert set(total.tolist()) == {number * world.size}


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_the_end_of_one_is_not_that_of_others(shared, world, end: str) -> None:
    """While messages of all of them, or of the others, are under way."""
    first, works = groups.new_group(None), []
    if world.rank == 0:
        works = [dist.irecv(torch.zeros(1), 1, each, 7) for each in [*shared, *([first] if end == "abort" else [])]]
    if end == "abort":
        public.resolve(first).abort()
    dist.destroy_process_group(first)
    for number, each in enumerate(shared):
        if world.rank == 1:
            dist.send(torch.tensor([float(number)]), 0, each, 7)
    for work in works[: len(shared)]:
        work.wait()
    for each in shared:
        assert_usable(each)


def test_a_communicator_of_the_users(shared, world) -> None:
    """It is nobody else's, though the group's is; and a tag too large is an error."""
    mine, other = (torchmpi_plugin.get_comm(each) for each in shared[1:])
    assert mine.py2f() != other.py2f()
    mine.send(1, (world.rank + 1) % world.size, tag=sharing.TAGS)
    assert not other.iprobe(tag=sharing.TAGS)
    assert mine.recv(source=(world.rank - 1) % world.size, tag=sharing.TAGS) == 1
    with pytest.raises(ValueError, match="tag"):
        dist.send(torch.zeros(1), (world.rank + 1) % world.size, shared[1], sharing.TAGS)


def test_ranks_that_destroy_at_different_times(shared, world, new_group, monkeypatch) -> None:
    """Where they do not know the same communicator, the next group has one of its own."""
    kin = sharing.kin[tuple(range(world.size))]
    if world.rank == world.size - 1:
        monkeypatch.setattr(kin, "shared", None)
    assert_usable(new_group(None))
