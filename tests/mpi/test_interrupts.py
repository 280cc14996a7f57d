"""An exception that comes from outside at any instruction: Ctrl-C, another signal's. Nothing that C has begun is lost."""

from __future__ import annotations

import dis
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import only_up_to

import torchmpi_plugin
from torchmpi_plugin import agreement, engine, messages, process_group

pytestmark = [pytest.mark.mpi(min_size=2), only_up_to(2)]

PACKAGE = str(Path(torchmpi_plugin.__file__).parent)
#: Instructions of one call that are interrupted, at most: those of the loop that waits come again and again.
MOST = 400
COUNT = 5000


class Interrupted(BaseException):
    """What the tests raise: no ``except Exception`` is meant to stop it."""


@pytest.fixture
def impatient(monkeypatch) -> None:
    """A synchronous call comes back to Python after a moment, rather than after 50 ms."""
    for module in (process_group, messages, agreement, engine):
        monkeypatch.setattr(module, "SLICE_NS", 200_000)


# ---- at every instruction ----


def _leaves_a_with_block(code: CodeType) -> set[int]:
    """Where ``__exit__`` is called at the end of a with block: there no signal handler runs, and a lock would stay."""
    found, steps = set(), list(dis.get_instructions(code))
    for at in range(len(steps) - 2):
        if all(step.opname == "LOAD_CONST" and step.argval is None for step in steps[at : at + 3]):
            found |= {step.offset for step in steps[at : at + 6]}
    return found


class Interruption:
    """Raises Interrupted before the ``number``-th instruction that this thread runs in the package."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._safe: dict[CodeType, set[int]] = {}

    def __enter__(self) -> Interruption:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if self.left <= 0 or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event != "opcode" or self.left <= 0:
            return self._step
        code = frame.f_code
        if code not in self._safe:
            self._safe[code] = _leaves_a_with_block(code)
        if frame.f_lasti in self._safe[code]:
            return self._step
        self.left -= 1
        if self.left == 0:
            raise Interrupted
        return self._step


# ---- what is interrupted ----


class Starts:
    """Stands before the C library: counts the operations begun in a group."""

    NAMES = ("send", "recv", "exchange", "barrier", "broadcast", "allreduce", "reduce_to", "allgather")
    NAMES = tuple(f"mpp_{name}" for name in (*NAMES, "allgather_list", "reduce_scatter"))

    def __init__(self, lib: Any) -> None:
        self._lib, self.begun = lib, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib, name)
        if name not in self.NAMES:
            return function

        def counting(*operands: Any) -> Any:
            handle = function(*operands)
            self.begun += 1
            return handle

        return counting


def full(value: float, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), value)


def pair(value: float = 1.0) -> list[torch.Tensor]:
    return [full(value), full(value)]


def strided(value: float = 1.0) -> torch.Tensor:
    return torch.full((COUNT, 2), value)[:, 0]


def coalesced(group: Any, asynchronous: bool) -> Any:
    with torch.distributed._coalescing_manager(group=group, async_ops=asynchronous) as manager:
        for tensor in pair():
            dist.all_reduce(tensor, group=group)
    return manager if asynchronous else None


#: What rank 0 calls, and rank 1 with it: both are ranks of the group too.
CALLS: dict[str, Callable[[Any, bool], Any]] = {
    "barrier": lambda g, a: dist.barrier(g, async_op=a),
    "broadcast": lambda g, a: dist.broadcast(full(1), group_src=1, group=g, async_op=a),
    "all_reduce": lambda g, a: dist.all_reduce(full(1), group=g, async_op=a),
    "all_reduce_strided": lambda g, a: dist.all_reduce(strided(), group=g, async_op=a),
    "reduce": lambda g, a: dist.reduce(full(1), group_dst=0, group=g, async_op=a),
    "all_gather": lambda g, a: dist.all_gather(pair(), full(1), group=g, async_op=a),
    "all_gather_into_tensor": lambda g, a: dist.all_gather_into_tensor(
        full(0, 2 * COUNT), full(1), group=g, async_op=a
    ),
    "gather": lambda g, a: dist.gather(
        full(1), pair() if dist.get_rank() == 0 else None, group_dst=0, group=g, async_op=a
    ),
    "scatter": lambda g, a: dist.scatter(
        full(1), pair() if dist.get_rank() == 1 else None, group_src=1, group=g, async_op=a
    ),
    "reduce_scatter": lambda g, a: dist.reduce_scatter(full(0), pair(), group=g, async_op=a),
    "reduce_scatter_tensor": lambda g, a: dist.reduce_scatter_tensor(full(0), full(1, 2 * COUNT), group=g, async_op=a),
    "all_to_all": lambda g, a: dist.all_to_all(pair(), pair(), group=g, async_op=a),
    "all_to_all_single": lambda g, a: dist.all_to_all_single(full(0), full(1), group=g, async_op=a),
    "message": lambda g, a: message(g, dist.get_rank(), a),
    "message_back": lambda g, a: message(g, 1 - dist.get_rank(), a),
    "coalesced_all_reduce": coalesced,
}


def message(group: Any, end: int, asynchronous: bool) -> Any:
    """Too long a message for MPI to take it in before its receiver comes."""
    start = (dist.irecv if asynchronous else dist.recv) if end == 0 else (dist.isend if asynchronous else dist.send)
    return start(
        full(float(end), 40 * COUNT), group=group, **{"group_src" if end == 0 else "group_dst": 1 - dist.get_rank()}
    )


def settle(group: Any, seconds: float = 20.0) -> None:
    """Wait until nothing is under way, and nothing is left of it in the books."""
    running, until = engine.start(), time.monotonic() + seconds
    while group._lib.mpp_group_active(group._handle) or running._registry:
        assert time.monotonic() < until, f"still under way: {running.pending()}, in the books: {running._registry}"
        time.sleep(0.0002)
    assert running.interrupted == []
    assert group._lib.mpp_unclaimed() == 0


@contextmanager
def counted(group: Any) -> Iterator[Starts]:
    group._lib = starts = Starts(group._lib)
    try:
        yield starts
    finally:
        group._lib = starts._lib


def interrupted_call(call: Callable[[Any, bool], Any], group: Any, asynchronous: bool, number: int) -> tuple[bool, int]:
    """Whether the call was interrupted, and how many operations it had begun by then."""
    with counted(group) as starts:
        try:
            with Interruption(number):
                call(group, asynchronous)
            return False, starts.begun
        except Interrupted:
            return True, starts.begun


def take_part(name: str, group: Any, begun: int) -> None:
    """Rank 1's side of what rank 0 has begun."""
    if name == "coalesced_all_reduce":
        for _ in range(begun):
            dist.all_reduce(full(1), group=group)
    elif begun:
        CALLS[name](group, False)


@pytest.mark.timeout(110)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_at_every_instruction(name: str, asynchronous: bool, new_group, channel, impatient) -> None:
    """Rank 0 is interrupted at one after the other, while rank 1 has not come; what it has begun goes on."""
    group = new_group(None)
    step = 1 if asynchronous or name in ("all_reduce", "all_reduce_strided", "coalesced_all_reduce") else 3
    for number in range(1, MOST, step):
        if dist.get_rank() == 0:
            interrupted, begun = interrupted_call(CALLS[name], group, asynchronous, number)
            poison = [full(-1.0) for _ in range(6)]  # likely where the call's tensors were
            if number % 20 == 0:
                gc.collect()
            channel.send((interrupted, begun), dest=1)
        else:
            interrupted, begun = channel.recv(source=0)
            take_part(name, group, begun)
        if dist.get_rank() == 0:
            settle(group)
            assert all(bool((tensor == -1).all()) for tensor in poison), "a tensor that is gone was written to"
        tensor = full(dist.get_rank() + 1.0)
        dist.all_reduce(tensor, group=group)
        assert tensor.unique().tolist() == [3.0], f"after an interrupt at instruction {number}"
        if not interrupted:
            break
    assert number > 30, "hardly anything was interrupted"


# ---- by signals ----


@pytest.mark.parametrize("count", [1, 4096, 1 << 20])
def test_signals_at_random_moments(count: int, new_group, channel) -> None:
    """Timers of every length from 0 to 60 ms go off in a call whose partner comes late, some of them twice."""
    group, rank = new_group(None), dist.get_rank()

    def go_off(*_: Any) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, go_off)
    try:
        for turn in range(40):
            begun = 1
            if rank == 0:
                with counted(group) as starts:
                    try:
                        signal.setitimer(
                            signal.ITIMER_REAL, 1e-6 + turn % 20 * 3e-3 * (turn % 4 > 0), 2e-5 * (turn % 3)
                        )
                        dist.all_reduce(full(1.0, count), group=group)
                    except Interrupted:
                        pass
                    finally:
                        quiet()
                    begun = starts.begun
                poison = [full(-1.0, count) for _ in range(4)]
            begun = channel.bcast(begun)
            if rank == 1 and begun:
                dist.all_reduce(full(1.0, count), group=group)
            if rank == 0:
                engine.start().recover()
                settle(group)
                assert all(bool((tensor == -1).all()) for tensor in poison), "a tensor that is gone was written to"
            tensor = full(rank + 1.0, count)
            dist.all_reduce(tensor, group=group)
            assert tensor.unique().tolist() == [3.0]
    finally:
        signal.signal(signal.SIGALRM, previous)


def quiet() -> None:
    """No timer any more, whatever comes until then."""
    while signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            continue
