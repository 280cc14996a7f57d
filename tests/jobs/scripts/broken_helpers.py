"""Helpers on the way of an error or an answer raise: the error stays the one it was, and every thread goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from steps import raises, say

from torchmpi_plugin.diagnosis import diagnosis, flight_recorder, monitor
from torchmpi_plugin.engine import engine
from torchmpi_plugin.store.checkin import CheckIn

KINDS = [OSError("no"), ReferenceError("no"), MemoryError("no")]
SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=120)
OF_WHO_ASKS: list[tuple[Any, str]] = [
    *((diagnosis.Diagnosis, name) for name in ("_what_they_do", "timed_out")),
    *((monitor, "ask"), (flight_recorder.Recorder, "write")),
]
OF_WHO_ANSWERS: list[tuple[Any, str]] = [
    *((monitor, name) for name in ("describe", "_answer")),
    *((monitor.Monitor, name) for name in ("_answers", "_write_trace_if_wanted")),
]
OF_A_COLLECTIVE: list[tuple[Any, str]] = [(diagnosis.Diagnosis, "look"), (CheckIn, "_heard"), (CheckIn, "_present")]


def raising(helpers: list[tuple[Any, str]]) -> Iterator[tuple[str, mock.Mock]]:
    """Within each step one helper raises one kind, and is called."""
    for owner, name in helpers:
        for kind in KINDS:
            assert flight_recorder.current is not None
            flight_recorder.current._dumped = False  # one trace for each failure
            with mock.patch.object(owner, name, side_effect=kind) as helper:
                yield f"{name} raises {kind!r}", helper
            called[name] = called.get(name, 0) + helper.call_count
            assert threads() >= before, (name, kind, before - threads())


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name != "mpiplus-store"}


called: dict[str, int] = {}
monitor.LOOK_EVERY, monitor.ANSWER_WITHIN = 0.05, 0.2
monitor._UNASKED_SECONDS = 0.02  # less than that: else who was late once would look for questions taken back for ever
dist.init_process_group("mpiplus")
rank, world, tensor = dist.get_rank(), dist.group.WORLD, torch.ones(2)
engine.start().poll_in_background()
before = threads()
assert {"mpiplus-status", "mpiplus"} <= before, before
world.set_timeout(SHORT)
if rank == 0:
    for _ in raising(OF_WHO_ASKS):
        with raises(dist.DistBackendError, "timed out"):
            world.recv([tensor], 1, 7).wait()
    for _ in raising([(diagnosis.Diagnosis, "timed_out")]):
        work = world.recv([tensor], 1, 7)  # nobody waits for it: the thread that completes operations sees to its end
        until = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < until
            time.sleep(0.01)
        with raises(dist.DistBackendError, "timed out"):
            work.wait()
world.set_timeout(LONG)
dist.barrier()
if rank == 1:
    monitor.monitor.want_traces()
    for what, helper in raising(OF_WHO_ANSWERS):
        until = time.monotonic() + 20
        while not helper.called:
            with contextlib.suppress(*map(type, KINDS)):
                monitor.monitor.ask([1])  # itself
            assert time.monotonic() < until, what
dist.barrier()
for _ in raising(OF_A_COLLECTIVE):
    group = dist.new_group([0, 1])
    group.set_timeout(timedelta(seconds=8 * engine.SLICE_NS / 1e9))  # whoever waits looks after each slice
    if rank == 0:
        with raises(dist.DistBackendError, "timed out"):
            dist.all_reduce(tensor, group=group)
    dist.barrier()
assert rank == 1 or all(called[name] for _, name in [*OF_WHO_ASKS, *OF_A_COLLECTIVE]), called
# The thread that answers has come through all that: it says what this rank does, once rank 1 has come to its barrier.
if rank == 0:
    monitor.ANSWER_WITHIN = 10.0
    world.set_timeout(SHORT)
    until, told = time.monotonic() + 20, ""
    while "barrier (sequence number" not in told:
        assert time.monotonic() < until, told
        with raises(dist.DistBackendError) as caught:
            world.recv([tensor], 1, 7).wait()
        told = str(caught[0])
    world.set_timeout(LONG)
dist.barrier()
dist.destroy_process_group()
say("end")
