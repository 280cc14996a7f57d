"""When an asynchronous call moves its data itself (c_src/engine/inline_progress.c), with a made-up clock and load."""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from torchmpi_plugin.engine.engine import SLICE_NS

WINDOW = 50_000_000
MIB = 1 << 20


@pytest.fixture(params=["_shim_int", "_shim_ptr"])
def shim(request):
    return importlib.import_module(f"torchmpi_plugin.{request.param}")


class Clocks:
    """The clocks of a process, which only the test moves; each says how often it was asked."""

    NAMES = ("now", "process", "background", "idle")
    tells_idle = True

    def __init__(self, shim, mode: int, share: float = 1.0) -> None:
        self.lib, self.ffi = shim.lib, shim.ffi
        self.values = dict.fromkeys(self.NAMES, 1_000_000_000)
        self.asked = dict.fromkeys(self.NAMES, 0)
        self._callbacks = {name: shim.ffi.callback("int64_t(void)", partial(self._ask, name)) for name in self.NAMES}
        self._clocks = shim.ffi.new("mpp_inline_clocks *", self._callbacks)
        self._rule = shim.ffi.new("mpp_inline_rule *", {"mode": mode, "load": {"share": share}})
        self.group = shim.ffi.new("mpp_inline *")

    def _ask(self, name: str) -> int:
        self.asked[name] += 1
        return self.values[name] if name != "idle" or self.tells_idle else -1

    def pass_by(self, windows: float, **cores: float) -> None:
        """Let windows of time pass, with so many cores used by the whole process, by its background, and by nobody."""
        for name, part in {"now": 1.0, **cores}.items():
            self.values[name] += int(part * windows * WINDOW)

    def call(self) -> bool:
        return bool(self.lib.mpp_inline_ns(self._rule, self.group, MIB, self._clocks))


class Node:
    """A rank's view of its node: it computes on some cores for a while, and so do others."""

    def __init__(self, shim, share: float, cores: int) -> None:
        self.cores, self.clocks = cores, Clocks(shim, shim.lib.MPP_INLINE_AUTO, share)

    def passes(self, own: float, others: float = 0.0, windows: float = 1.0, tells_idle: bool = True) -> bool:
        """Some windows of time pass, with so many cores in use; whether none is left for the background."""
        self.clocks.pass_by(windows, process=own, idle=max(0.0, self.cores - own - others))
        self.clocks.tells_idle = tells_idle
        return self.clocks.call()


@pytest.mark.parametrize(
    ("share", "cores", "own", "others", "is_taken"),
    [
        (1, 2, 1.0, 1.0, True),  # two ranks that compute on two cores
        (1, 2, 0.05, 0.05, False),  # the same two asleep, as while a device computes
        (1, 2, 0.55, 0.55, False),  # a device computes, and the ranks copy what it has found for half of the time
        (1, 2, 0.8, 0.3, True),  # most of a rank's only core: a thread more would take it from this one
        (8, 16, 1.0, 1.0, False),  # one thread each, and seven cores idle
        (8, 16, 7.9, 7.9, True),  # as many threads as cores
        (8, 16, 7.0, 7.0, False),  # a core is left
        (0.5, 2, 0.5, 1.5, True),  # four ranks on two cores
        (0.5, 2, 0.1, 0.3, False),
        (2, 2, 1.0, 1.0, True),  # half of this node's cores, but nothing is idle: another job's, or pretended nodes
        (2, 2, 0.1, 1.9, False),  # it does not compute itself, so that it loses nothing to its background
    ],
)
def test_cores(shim, share: float, cores: int, own: float, others: float, is_taken: bool) -> None:
    node = Node(shim, share, cores)
    assert not node.passes(own, others)  # the first look knows nothing
    assert node.passes(own, others) == is_taken
    assert node.passes(own, others, windows=7) == is_taken


def test_a_look_counts_for_a_window(shim) -> None:
    node = Node(shim, 1, 2)
    node.passes(0)
    assert node.passes(1, 1)
    assert node.passes(0, 1, windows=0.5)  # not yet
    assert not node.passes(0, 1, windows=0.6)


def test_a_kernel_that_does_not_say_what_is_idle(shim) -> None:
    node = Node(shim, 2, 2)
    node.passes(1, 1, tells_idle=False)
    assert not node.passes(1, 1, tells_idle=False)
    assert node.passes(1.9, tells_idle=False)
    assert not node.passes(1, 1)  # the idle time of a window has two ends


def test_the_more_is_moved_the_longer_a_call_may_take(shim) -> None:
    group = shim.ffi.new("mpp_inline *")
    limits = [shim.lib.mpp_inline_try(group, size) for size in (8, MIB, 25 * MIB)]
    assert limits == [1_000_012, 1_000_000 + 3 * MIB // 2, 1_000_000 + 3 * 25 * MIB // 2]


def test_a_call_never_holds_up_a_signal_for_long(shim) -> None:
    """As long as a synchronous call waits in C before Python looks for Ctrl-C."""
    group = shim.ffi.new("mpp_inline *")
    limits = [shim.lib.mpp_inline_try(group, size) for size in (31 * MIB, 1 << 30, 1 << 50, (1 << 64) - 1)]
    assert limits == [1_000_000 + 3 * 31 * MIB // 2, *[SLICE_NS] * 3]


@pytest.mark.parametrize(("mode", "polls"), [("NEVER", False), ("ALWAYS", True)])
def test_a_mode_that_asks_no_clock(shim, mode: str, polls: bool) -> None:
    clocks = Clocks(shim, getattr(shim.lib, f"MPP_INLINE_{mode}"))
    for _ in range(3):
        clocks.pass_by(1, process=1, idle=0 if mode == "NEVER" else 1)
        assert clocks.call() == polls
    assert not any(clocks.asked.values())


def test_always_still_learns(shim) -> None:
    clocks = Clocks(shim, shim.lib.MPP_INLINE_ALWAYS)
    for _ in range(2):
        assert clocks.call()
        shim.lib.mpp_inline_note(clocks.group, False)
    assert [clocks.call() for _ in range(3)] == [False, False, True]


def test_auto_follows_the_load(shim) -> None:
    """A window late at the most; and within a window it asks for the time only."""
    clocks = Clocks(shim, shim.lib.MPP_INLINE_AUTO)
    assert not clocks.call()
    polls = []
    for busy in (1.0, 1.0, 0.1, 0.1, 1.0):
        for _ in range(5):
            clocks.pass_by(0.2, process=busy, idle=1 - busy)
            polls.append(clocks.call())
    assert polls == [False] * 4 + [True] * 10 + [False] * 10 + [True]
    assert clocks.asked == {"now": 26, "process": 6, "background": 6, "idle": 6}


@pytest.mark.parametrize(("background", "is_taken"), [(0.0, True), (0.3, True), (0.7, False), (1.0, False)])
def test_the_background_is_no_computation(shim, background: float, is_taken: bool) -> None:
    """Its thread polls while data comes: a program that sleeps meanwhile has its core to spare."""
    clocks = Clocks(shim, shim.lib.MPP_INLINE_AUTO)
    clocks.call()
    clocks.pass_by(1, process=1.0, background=background)
    assert clocks.call() == is_taken


def calls(shim, group, is_complete) -> list[int]:
    """Which of 1,000 calls poll, each complete in time as told."""
    polled = []
    for number in range(1000):
        if shim.lib.mpp_inline_try(group, MIB):
            polled.append(number)
            shim.lib.mpp_inline_note(group, is_complete(number))
    return polled


def test_others_that_never_come_in_time(shim) -> None:
    """A pipeline's stage, a straggler, a slow wire: tried ever more rarely, and never given up for good."""
    polled = calls(shim, shim.ffi.new("mpp_inline *"), lambda number: False)
    assert polled == [0, 1, 4, 11, 26, 57, 120, 247, 502, 757]


def test_others_that_come_again(shim) -> None:
    """One call in time, and the next are tried at once."""
    polled = calls(shim, shim.ffi.new("mpp_inline *"), lambda number: number >= 100)
    assert polled[:7] == [0, 1, 4, 11, 26, 57, 120]
    assert polled[7:] == list(range(121, 1000))


def test_one_that_is_late_now_and_then(shim) -> None:
    """A single miss costs nothing but itself."""
    polled = calls(shim, shim.ffi.new("mpp_inline *"), lambda number: number % 10 != 0)
    assert polled == list(range(1000))
