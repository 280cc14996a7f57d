"""What PyTorch's own MPI backend gets wrong: its hangs, its silent errors, its crashes.

Resources that it leaks are in test_resources.py, time limits that it ignores in test_timeouts.py; what it refuses is in
the table of operations, and what has to be refused in test_random_arguments.py.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist

ERRORS = (ValueError, TypeError, RuntimeError)  # DistBackendError is a RuntimeError
HUGE = 2**31 + 8


def sum_of_ranks(group=None, ranks=None) -> None:
    """An all_reduce whose result only comes out right if exactly these ranks took part in it."""
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    tensor = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [sum(ranks), len(ranks)]


# ---- it hangs ----


@pytest.mark.mpi(min_size=3)
def test_new_group_waits_for_no_other_rank(new_group, channel) -> None:
    """The outsiders call new_group only after the members have made the group and used it."""
    rank = dist.get_rank()
    if rank > 1:
        channel.recv(source=0, tag=1)
    pair = new_group([0, 1])
    if rank < 2:
        sum_of_ranks(pair, [0, 1])
    else:
        assert pair == dist.GroupMember.NON_GROUP_MEMBER
    if rank == 0:
        for outsider in range(2, channel.size):
            channel.send("go on", dest=outsider, tag=1)


# ---- it is silently wrong ----


@pytest.mark.skipif("MPIPLUS_TEST_HUGE" not in os.environ, reason="MPIPLUS_TEST_HUGE=1 asks for 2 GiB tensors")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "send"])
def test_more_than_2_31_elements(operation: str) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensor = torch.zeros(HUGE, dtype=torch.uint8)
    marks = [0, 1, 2**31 - 1, 2**31, HUGE - 1]
    if operation == "all_reduce" or rank == 0:
        tensor[marks] = 1
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    elif operation == "broadcast":
        dist.broadcast(tensor, 0)
    elif rank == 0 and last > 0:
        dist.send(tensor, last)
    elif rank == last and last > 0:
        dist.recv(tensor, 0)
    if operation != "send" or rank in (0, last):
        value = dist.get_world_size() if operation == "all_reduce" else 1
        assert tensor[marks].tolist() == [value] * len(marks)
        assert torch.count_nonzero(tensor).item() == len(marks)


@pytest.mark.mpi(min_size=4)
def test_groups_of_one_name(new_group) -> None:
    mine = [rank for rank in range(dist.get_world_size()) if rank // 2 == dist.get_rank() // 2]
    for _ in range(3):  # torch counts for the names, and nobody makes a group that it is not in
        sum_of_ranks(new_group(mine), mine)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("any_source", [False, True])
def test_recv_leaves_the_applications_messages_alone(any_source: bool) -> None:
    from mpi4py import MPI

    rank, world = dist.get_rank(), MPI.COMM_WORLD
    if rank == 0:
        request = world.Isend(torch.full((4,), -1.0).numpy(), dest=1, tag=0)
        dist.send(torch.full((4,), 5.0), 1)
        request.Wait()
    elif rank == 1:
        ours, theirs = torch.zeros(4), torch.zeros(4)
        dist.recv(ours, None if any_source else 0)
        world.Recv(theirs.numpy(), source=0, tag=0)
        assert ours.tolist() == [5.0] * 4
        assert theirs.tolist() == [-1.0] * 4


# ---- it ends the process or the job ----


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_dropping_an_unfinished_isend(count: int, channel) -> None:
    rank = dist.get_rank()
    if rank == 0:
        tensor = torch.full((count,), 3.0)
        dist.isend(tensor, 1)
        del tensor
        gc.collect()
        torch.full((count,), -1.0)  # likely where the dropped tensor was
    channel.Barrier()
    if rank == 1:
        tensor = torch.empty(count)
        dist.recv(tensor, 0)
        assert tensor.unique().tolist() == [3.0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [100, 300_000])
def test_a_receive_buffer_that_is_too_small(count: int, new_group) -> None:
    """The receiver is told, nothing is written past its buffer, and the group goes on."""
    group = new_group(None)
    rank, room = dist.get_rank(), torch.zeros(count)
    if rank == 0:
        dist.isend(torch.ones(count), 1, group=group).wait()
    elif rank == 1:
        with pytest.raises(RuntimeError, match=r"(?i)trunc|too small|larger|longer|bytes"):
            dist.recv(room[:10], 0, group=group)
    sum_of_ranks(group)
    assert room[10:].unique().tolist() == [0]
