"""When an asynchronous call moves its data itself (c_src/engine/inline_progress.c), with a made-up clock and load."""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from torchmpi_plugin.engine.engine import SLICE_NS

WINDOW = 50_000_000
MIB = 1 << 20


@pytest.fixture
def shim():
    return importlib.import_module("torchmpi_plugin._shim_int")


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
        self._rule = shim.ffi.new("mpp_inline_rule *", {"mode": mode, "share": share})
        self.group = shim.ffi.new("mpp_inline *")

    def _ask(self, name: str) -> int:
        self.asked[name] += 1
        return self.values[name] if name != "idle" or self.tells_idle else -1

    def pass_by(self, windows: float, **cores: float) -> None:
        """Let windows of time pass, with so many cores used by the whole process, by its background, and by nobody."""
        for name, part in {"now": 1.0, **cores}.items():
            self.values[name] += int(part * windows * WINDOW)

    def call(self, size: int = MIB) -> int:
        return self.lib.mpp_inline_ns(self._rule, self.group, size, self._clocks)


@pytest.mark.parametrize(
    ("share", "cores", "own", "others", "is_taken"),
    [
        (1, 2, 1.0, 1.0, True),  # two ranks that compute on two cores
        (1, 2, 0.55, 0.55, False),  # a device computes, and the ranks copy what it has found for half of the time
        (1, 2, 0.8, 0.3, True),  # most of a rank's only core: a thread more would take it from this one
        (8, 16, 1.0, 1.0, False),  # one thread each, and seven cores idle
        (8, 16, 7.9, 7.9, True),  # as many threads as cores
        (0.5, 2, 0.5, 1.5, True),  # four ranks on two cores
        (2, 2, 1.0, 1.0, True),  # half of this node's cores, but nothing is idle: another job's, or pretended nodes
        (2, 2, 0.1, 1.9, False),  # it does not compute itself, so that it loses nothing to its background
        (2, 2, 1.0, None, False),  # a kernel that does not say what is idle
        (2, 2, 1.9, None, True),
    ],
)
def test_cores(shim, share: float, cores: int, own: float, others: float | None, is_taken: bool) -> None:
    """A rank's view of its node: it computes on some cores for a while, and so do others."""
    clocks = Clocks(shim, shim.lib.MPP_INLINE_AUTO, share)
    clocks.tells_idle = others is not None
    for windows, expected in ((1, False), (1, is_taken), (7, is_taken)):  # the first look knows nothing
        clocks.pass_by(windows, process=own, idle=max(0.0, cores - own - (others or 0)))
        assert bool(clocks.call()) == expected


def test_a_call_never_holds_up_a_signal_for_long(shim) -> None:
    """As long as a synchronous call waits in C before Python looks for Ctrl-C."""
    clocks = Clocks(shim, shim.lib.MPP_INLINE_ALWAYS)
    limits = [clocks.call(size) for size in (31 * MIB, 1 << 30, 1 << 50, (1 << 64) - 1)]
    assert limits == [1_000_000 + 3 * 31 * MIB // 2, *[SLICE_NS] * 3]


def test_auto_follows_the_load(shim) -> None:
    """A window late at the most; and within a window it asks for the time only."""
    clocks = Clocks(shim, shim.lib.MPP_INLINE_AUTO)
    assert not clocks.call()
    polls = []
    for busy in (1.0, 1.0, 0.1, 0.1, 1.0):
        for _ in range(5):
            clocks.pass_by(0.2, process=busy, idle=1 - busy)
            polls.append(bool(clocks.call()))
    assert polls == [False] * 4 + [True] * 10 + [False] * 10 + [True]
    assert clocks.asked == {"now": 26, "process": 6, "background": 6, "idle": 6}


@pytest.mark.parametrize(("background", "is_taken"), [(0.3, True), (0.7, False)])
def test_the_background_is_no_computation(shim, background: float, is_taken: bool) -> None:
    """Its thread polls while data comes: a program that sleeps meanwhile has its core to spare."""
    clocks = Clocks(shim, shim.lib.MPP_INLINE_AUTO)
    clocks.call()
    clocks.pass_by(1, process=1.0, background=background)
    assert bool(clocks.call()) == is_taken


@pytest.mark.parametrize(
    ("is_complete", "polled"),
    [
        (lambda number: False, [0, 1, 4, 11, 26, 57, 120, 247, 502, 757]),  # ever more rarely, and never given up
        (lambda number: number >= 100, [0, 1, 4, 11, 26, 57, *range(120, 1000)]),  # one in time, and then at once
        (lambda number: number % 10 != 0, list(range(1000))),  # a single miss costs nothing but itself
    ],
)
def test_others_that_do_not_come_in_time(shim, is_complete, polled: list[int]) -> None:
    """A pipeline's stage, a straggler, a slow wire: which of 1,000 calls poll, each complete in time as told."""
    clocks, found = Clocks(shim, shim.lib.MPP_INLINE_ALWAYS), []
    for number in range(1000):
        if clocks.call():
            found.append(number)
            shim.lib.mpp_inline_note(clocks.group, is_complete(number))
    assert found == polled
