"""Each helper on the way of an error or an answer raises: the error stays the one it was, and every thread goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from steps import say

from torchmpi_plugin.diagnosis import diagnosis, flight_recorder, monitor
from torchmpi_plugin.engine import engine
from torchmpi_plugin.group import failures
from torchmpi_plugin.store.checkin import CheckIn

KINDS = [OSError("no"), ReferenceError("no"), MemoryError("no")]
SHORT = timedelta(seconds=0.05)
OF_WHO_ASKS: list[tuple[Any, str]] = [
    *((diagnosis.Diagnosis, name) for name in ("_what_they_do", "_ask", "_understood", "timed_out", "_in_words")),
    *((monitor, name) for name in ("ask", "_forget")),
    *((flight_recorder.Recorder, name) for name in ("write", "dump")),
    (flight_recorder, "_file_prefix"),
]
OF_WHO_ANSWERS: list[tuple[Any, str]] = [
    *((monitor, name) for name in ("_place", "describe", "_answer", "_last_calls")),
    *((monitor.Monitor, name) for name in ("_answers", "_answer_locally", "_write_trace_if_wanted")),
    *((monitor.Inbox, "_answer"), (monitor.Seal, "put")),
    (flight_recorder, "_file_prefix"),
]
OF_A_COLLECTIVE: list[tuple[Any, str]] = [
    *((diagnosis.Diagnosis, name) for name in ("_who_is_missing", "_different_calls", "look")),
    *((CheckIn, name) for name in ("_say", "_heard", "_present")),
]


def raising(helpers: list[tuple[Any, str]]) -> Iterator[tuple[str, mock.Mock]]:
    """Within each step one helper raises one kind."""
    for owner, name in helpers:
        for kind in KINDS:
            assert flight_recorder.current is not None
            flight_recorder.current._dumped = False  # one trace for each failure
            with mock.patch.object(owner, name, side_effect=kind) as helper:
                yield f"{name} raises {kind!r}", helper
            called[name] = called.get(name, 0) + helper.call_count


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name != "mpiplus-store"}


called: dict[str, int] = {}
monitor.LOOK_EVERY, monitor.ANSWER_WITHIN = 0.05, 0.2
monitor._UNASKED_SECONDS = 0.02  # less than that: else who was late once would look for questions taken back for ever
dist.init_process_group("mpiplus")
rank = dist.get_rank()
tensor = torch.ones(2)
engine.start().poll_in_background()
before = threads()
assert {"mpiplus-status", "mpiplus"} <= before, before


def fails(what: str, words: str, call: Any) -> None:
    try:
        call()
    except dist.DistBackendError as error:
        assert words in str(error), (what, str(error))
    else:
        raise AssertionError(f"{what}: no error")
    assert threads() >= before, (what, before - threads())


def in_background(work: Any) -> None:
    """Nobody waits for it: its deadline is seen to by the thread that completes operations."""
    until = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.01)
    work.wait()


def receive() -> Any:
    pg = dist.group.WORLD
    return pg.recv([tensor], 1 - rank, 7)


dist.group.WORLD.set_timeout(SHORT)
if rank == 0:
    for what, _ in raising(OF_WHO_ASKS):
        fails(what, "timed out", lambda: receive().wait())
    for what, _ in raising([(diagnosis.Diagnosis, "timed_out")]):
        fails(f"in the background {what}", "timed out", lambda: in_background(receive()))
dist.group.WORLD.set_timeout(timedelta(seconds=120))
dist.barrier()
if rank == 1:
    monitor.monitor.want_traces()
    for what, helper in raising(OF_WHO_ANSWERS):
        until = time.monotonic() + 20
        while not helper.called:
            with contextlib.suppress(*map(type, KINDS)):
                monitor.monitor.ask([1])  # itself
            assert time.monotonic() < until, what
        assert threads() >= before, (what, before - threads())
dist.barrier()
for what, _ in raising(OF_A_COLLECTIVE):
    group = dist.new_group([0, 1])
    group.set_timeout(timedelta(seconds=2.4 * engine.SLICE_NS / 1e9))  # whoever waits looks after each slice
    if rank == 0:
        fails(what, "timed out", partial(dist.all_reduce, tensor, group=group))
    dist.barrier()
for what, _ in raising([(failures, "failure_of")]):
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        fails(what, "recv of (1,) float32 from rank 0", lambda: dist.recv(torch.ones(1), 0))
assert rank == 1 or all(called[name] for _, name in [*OF_WHO_ASKS, *OF_A_COLLECTIVE]), called
# The thread that answers has come through all that: it says what this rank does, once rank 1 has come to its barrier.
if rank == 0:
    monitor.ANSWER_WITHIN = 10.0
    dist.group.WORLD.set_timeout(SHORT)
    until, told = time.monotonic() + 20, ""
    while "barrier (sequence number" not in told:
        assert time.monotonic() < until, told
        try:
            receive().wait()
        except dist.DistBackendError as error:
            told = str(error)
    dist.group.WORLD.set_timeout(timedelta(seconds=120))
dist.barrier()
dist.destroy_process_group()
say("end")
