"""Time limits are honoured, and the error says what was waited for and who was missing."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import timedelta
from typing import Any

import groups
import inside
import pytest
import torch
import torch.distributed as dist
from groups import only_up_to
from torch.distributed import DistBackendError

import torchmpi_plugin

pytestmark = [pytest.mark.mpi(min_size=2), only_up_to(3)]

LIMIT = timedelta(seconds=0.5)


def check_message(message: str, operation: str, missing: int) -> None:
    """The operation, its group, its sequence number, this rank, the time passed, who is missing."""
    rank = dist.get_rank()
    for part in (
        rf"\b{operation}\b",
        r"\bgroup\b",
        r"(?i)sequence number \d+|seq\w*[ =#]*\d+",
        rf"\brank {rank}\b",
        r"\b\d+(\.\d+)? ?s\b",
        rf"\brank {missing}\b",
    ):
        assert re.search(part, message), f"no {part!r} in: {message}"


@pytest.mark.parametrize(
    ("operation", "asynchronous"),
    [("all_reduce", False), ("all_reduce", True), ("barrier", False), ("all_gather", True), ("scan", False)],
)
def test_a_group_timeout(operation: str, asynchronous: bool, new_group, channel) -> None:
    """Rank 0 comes when the others have given up."""
    group = new_group(None, timeout=LIMIT)
    tensor = torch.ones(5)

    def collective():
        if operation == "all_reduce":
            return dist.all_reduce(tensor, group=group, async_op=asynchronous)
        if operation == "scan":
            return torchmpi_plugin.scan(tensor, group=group, async_op=asynchronous)
        if operation == "barrier":
            return dist.barrier(group, async_op=asynchronous)
        outputs = [torch.empty(5) for _ in range(channel.size)]
        return dist.all_gather(outputs, tensor, group=group, async_op=asynchronous)

    if dist.get_rank() == 0:
        channel.Barrier()
        finish_late(collective)
        return
    start = time.monotonic()
    with pytest.raises(DistBackendError) as caught:
        work = collective()
        if work is not None:
            work.wait()
    took = time.monotonic() - start
    channel.Barrier()
    assert 0.45 < took < 10
    check_message(str(caught.value), operation, missing=0)


def finish_late(collective) -> None:
    """Let the collective that the others gave up come to its end, so that nothing stays pending."""
    with contextlib.suppress(DistBackendError):  # it may as well say that the group has failed
        if (work := collective()) is not None:
            work.wait()


@pytest.mark.parametrize("kind", ["recv", "recv from anyone"])
def test_a_receives_own_timeout(kind: str, channel) -> None:
    """It raises at its time, and the receive goes on: the message that comes later is taken."""
    rank = dist.get_rank()
    if rank == 1:
        tensor = torch.zeros(3)
        work = dist.irecv(tensor, 0 if kind == "recv" else None, tag=3)
        start = time.monotonic()
        with pytest.raises(DistBackendError, match=r"\brecv\w*\b"):
            work.wait(0.4)  # as gloo: a number is one of seconds
        assert 0.3 < time.monotonic() - start < 5
        assert not work.is_completed()
    channel.Barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=3)
    elif rank == 1:
        work.wait()
        assert tensor.tolist() == [1.0] * 3


def test_a_receive_that_times_out_is_taken_back(new_group, channel) -> None:
    """By the group's own deadline; then nothing has changed."""
    group, tensor = new_group(None), torch.zeros(3)
    if dist.get_rank() == 0:
        inside.set_timeout(group, LIMIT)  # only here, where nobody is in time however fast the machine
        receives: list[tuple[Any, int | None, str]]
        receives = [(dist.recv, 1, "rank 1"), (dist.irecv, 1, "rank 1"), (dist.recv, None, "any")]
        for receive, source, words in receives:
            told = rf"(?s)^recv.* from {words}.* with tag 3 .*group '.*timed out on rank 0.*after \d+\.\d s"
            with pytest.raises(DistBackendError, match=told):
                receive(tensor, source, group=group, tag=3).wait()  # dist.recv never comes here
        inside.set_timeout(group, groups.GROUP_TIMEOUT)
    channel.Barrier()
    if dist.get_rank() == 1:
        dist.send(torch.full((3,), 8.0), 0, group=group, tag=3)
    elif dist.get_rank() == 0:
        dist.recv(tensor, 1, group=group, tag=3)
        assert tensor.tolist() == [8.0] * 3
    dist.barrier(group)


@pytest.mark.parametrize("names_all", [False, True])
def test_monitored_barrier_names_who_is_missing(names_all: bool, new_group, channel) -> None:
    group, last = new_group(None), channel.size - 1
    if names_all and last < 2:
        pytest.skip("one is missing, and no other")
    if dist.get_rank() not in ((1, last) if names_all else (last,)):
        words = rf"group '.*\branks 1, {last}\b" if names_all else rf"group '.*\brank {last}\b"
        with pytest.raises(DistBackendError, match=words):
            torchmpi_plugin.monitored_barrier(group, 6 * LIMIT, wait_all_ranks=names_all)
    channel.Barrier()


def message_from_0_to_1(group: dist.ProcessGroup, value: float) -> torch.Tensor:
    tensor = torch.full((5,), value if dist.get_rank() == 0 else -1.0)
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
    return tensor


def all_to_all(group: dist.ProcessGroup, value: float) -> torch.Tensor:
    received = torch.zeros(2, 5)
    dist.all_to_all_single(received, torch.full((2, 5), value), group=group)
    return received


@pytest.mark.parametrize("talk, gives_up", [(message_from_0_to_1, 1), (all_to_all, 0)])
def test_a_new_group_does_not_see_messages_of_the_old_one(talk, gives_up: int, new_group, channel) -> None:
    """One that its receiver had given up, or never came for: MPI may give the old communicator's number to the next."""
    rank = dist.get_rank()
    old = groups.new_group([0, 1], timedelta(seconds=0.5))
    if rank == gives_up:
        with pytest.raises(DistBackendError):
            talk(old, 1.0)
    channel.Barrier()
    if rank == 0 and gives_up == 1:
        talk(old, 1.0)
    if rank < 2:
        dist.destroy_process_group(old)
    new = new_group([0, 1])
    if rank < 2:
        assert talk(new, 2.0).unique().tolist() == [2.0]
