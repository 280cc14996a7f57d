"""What must not grow: communicators and memory; and what must not be taken: the core of whoever computes."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from groups import assert_usable, only_up_to
from sampling import count as in_full_or

import torchmpi_plugin
from torchmpi_plugin.mpi import runtime

pytestmark = only_up_to(3)
CYCLES = in_full_or(500, 40)
OPERATIONS = in_full_or(10_000, 1000)
MIB = 2**20
#: What may be left in memory: of anything once, and of each cycle and operation, as sums scatter.
PER_CYCLE, PER_OPERATION = 6144, 100


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


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
        assert_usable(group)
        dist.destroy_process_group(group)


@pytest.mark.timeout(120)
def test_new_group_and_destroy_leave_nothing_behind(channel) -> None:
    cycle(50)
    memory, number = resident_bytes(), next_communicator(channel)
    cycle(CYCLES)
    assert next_communicator(channel) - number < 10, "communicators are not freed"
    assert resident_bytes() - memory < MIB + CYCLES * PER_CYCLE


def test_a_communicator_that_cannot_be_freed(new_group, caplog) -> None:
    """As one of get_comm() on which a library has something that fails then: that is said, and the group ends."""
    group = new_group(None)
    mpi, given = runtime.mpi(), torchmpi_plugin.get_comm(group)
    group.user_communicator = Mock(Free=Mock(side_effect=mpi.Exception(mpi.ERR_OTHER)))
    with caplog.at_level(logging.WARNING, "torchmpi_plugin"):
        group.shutdown()
    assert "get_comm() gave of group" in caplog.text and group.user_communicator is None
    given.Free()


def test_groups_keep_no_descriptors(new_group) -> None:
    """However many there are."""

    def opened_with(more_groups: int) -> int:
        for _ in range(more_groups):
            new_group(None)
        return psutil.Process().num_fds()

    before = opened_with(3)
    assert opened_with(60) <= before + 2


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
    assert resident_bytes() - memory < MIB + OPERATIONS * PER_OPERATION
    assert next_communicator(channel) - number < 4


def wake_ups_of_others() -> int:
    """How often threads of this process but for this one have gone to sleep until now.

    Not those of gloo's groups, which other tests have made: each looks around every 10 ms.
    """
    others = (task for task in Path("/proc/self/task").iterdir() if int(task.name) != threading.get_native_id())
    return sum(
        int(count)
        for task in others
        if not (task / "comm").read_text().startswith("gloo")
        for count in re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
    )


@pytest.mark.mpi(min_size=2)
def test_the_background_sleeps_when_nothing_is_pending(channel) -> None:
    channel.Barrier()
    if dist.get_rank() == 0:
        time.sleep(0.05)  # so that the others' calls are pending for a while
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    in_40_ms = []
    while len(in_40_ms) < 20 and (not in_40_ms or in_40_ms[-1] >= 20):  # it is half awake for a while
        before = wake_ups_of_others()
        time.sleep(0.04)
        in_40_ms.append(wake_ups_of_others() - before)
    assert in_40_ms[-1] < 20, in_40_ms
