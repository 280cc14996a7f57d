"""Groups that are destroyed while threads use them, and operations that fail meanwhile."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from groups import only_up_to
from sampling import count
from torch.distributed import DistBackendError

from torchmpi_plugin.engine import engine

pytestmark = [pytest.mark.mpi(min_size=2), only_up_to(2)]


@pytest.mark.timeout(100)
def test_destroyed_while_its_operations_fail(channel, monkeypatch) -> None:
    """The exit grace is over at once: what is pending fails in the background while the group's memory goes."""
    monkeypatch.setattr(engine, "grace_seconds", 0.001)
    for turn in range(count(120, 40)):
        group = dist.new_group(None)
        works = []
        if dist.get_rank() == 0:
            works = [dist.all_reduce(torch.ones(100), group=group, async_op=True) for _ in range(1 + turn % 5)]
            if turn % 2:
                time.sleep(0.0003 * (turn % 7))
        dist.destroy_process_group(group)
        for work in works:
            with pytest.raises(DistBackendError):
                work.wait()
        channel.Barrier()


def use_for_ever(group: dist.ProcessGroup, errors: list[Exception]) -> None:
    try:
        while True:
            group.allreduce([torch.ones(10)]).wait()
    except Exception as error:
        errors.append(error)


@pytest.mark.timeout(100)
def test_destroyed_under_threads_that_use_it(channel, monkeypatch) -> None:
    """They get an error, each time, and nothing else: not a group that is no more."""
    monkeypatch.setattr(engine, "grace_seconds", 0.01)
    for turn in range(count(25, 10)):
        group, errors = dist.new_group(None), []
        threads = [threading.Thread(target=use_for_ever, args=(group, errors)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * (turn % 5))
        group.shutdown()
        for thread in threads:
            thread.join(30)
        over = [thread.is_alive() for thread in threads]
        channel.Barrier()
        dist.destroy_process_group(group)
        assert over == [False, False], "a thread hangs"
        assert all(isinstance(error, DistBackendError) for error in errors), errors


@pytest.mark.parametrize("how", ["abort", "shutdown", "destroy"])
def test_a_thread_that_waits_for_who_does_not_come(how: str, channel) -> None:
    """Another one ends the group, and it is freed: long before the group's own deadline."""
    group, errors = dist.new_group(None), []
    if dist.get_rank() == 0:
        thread = threading.Thread(target=use_for_ever, args=(group, errors))
        thread.start()
        while not engine.is_waited_for(group):
            time.sleep(0.01)
        getattr(group, how, partial(dist.destroy_process_group, group))()
        thread.join(15)
    channel.Barrier()
    if dist.get_rank() or how != "destroy":
        dist.destroy_process_group(group)
    ending = "was aborted" if how == "abort" else "is destroyed"
    assert [error for error in errors if not str(error).endswith(ending)] == []
    assert len(errors) == (dist.get_rank() == 0), "the waiter was not freed"
