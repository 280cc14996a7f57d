"""What must not grow: communicators and memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from groups import only_up_to

pytestmark = only_up_to(3)
CYCLES = 500
OPERATIONS = 10_000
MIB = 2**20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def next_communicator(channel) -> int:
    """The number that MPI gives the next communicator: it grows with those that are never freed.

    Open MPI and MPICH both number handles by the lowest free place.
    """
    probe = channel.Dup()
    number = probe.py2f()
    probe.Free()
    return number & 0xFFFF  # MPICH keeps the kind of handle above


def cycle(count: int) -> None:
    for _ in range(count):
        group = dist.new_group(None)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        assert tensor.tolist() == [dist.get_world_size()] * 3


def test_the_probe_sees_communicators_that_are_not_freed(channel) -> None:
    before = next_communicator(channel)
    kept = [channel.Dup() for _ in range(40)]
    after = next_communicator(channel)
    for communicator in kept:
        communicator.Free()
    assert after - before >= 20


@pytest.mark.timeout(120)
def test_new_group_and_destroy_leave_nothing_behind(channel) -> None:
    cycle(50)
    memory, number = resident_bytes(), next_communicator(channel)
    cycle(CYCLES)
    assert next_communicator(channel) - number < 10, "communicators are not freed"
    assert resident_bytes() - memory < 4 * MIB


def one_of_each(turn: int) -> None:
    tensor = torch.full((2,), float(turn))
    if turn % 10 == 0:
        dist.all_reduce(tensor, async_op=True).wait()
    elif turn % 10 == 1:
        dist.broadcast(tensor, 0, async_op=True).get_future().wait()
    elif turn % 10 == 2:
        dist.isend(tensor, dist.get_rank())
        dist.irecv(torch.empty(2), dist.get_rank()).wait()
    elif turn % 10 == 3:
        dist.all_gather([torch.empty(2) for _ in range(dist.get_world_size())], tensor)
    else:
        dist.all_reduce(tensor)


@pytest.mark.timeout(120)
def test_operations_leave_nothing_behind(channel) -> None:
    for turn in range(OPERATIONS // 10):
        one_of_each(turn)
    memory, number = resident_bytes(), next_communicator(channel)
    for turn in range(OPERATIONS):
        one_of_each(turn)
    dist.barrier()
    assert resident_bytes() - memory < 2 * MIB
    assert next_communicator(channel) - number < 4
