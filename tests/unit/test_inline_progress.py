"""When an asynchronous call moves its data itself (c_src/engine/inline_progress.c), with a made-up clock and load."""

from __future__ import annotations

import importlib

import pytest

WINDOW = 50_000_000
MIB = 1 << 20


@pytest.fixture(params=["_shim_int", "_shim_ptr"])
def shim(request):
    return importlib.import_module(f"torchmpi_plugin.{request.param}")


class Node:
    """A rank's view of its node: it computes on some cores for a while, and so do others."""

    def __init__(self, shim, share: float, cores: int) -> None:
        self.lib, self.cores = shim.lib, cores
        self.load = shim.ffi.new("mpp_core_load *", {"share": share})
        self.now = self.used = self.idle = 1_000_000_000

    def passes(self, own: float, others: float = 0.0, windows: float = 1.0, tells_idle: bool = True) -> bool:
        """Some windows of time pass, with so many cores in use; whether none is left for the background."""
        ns = int(WINDOW * windows)
        self.now += ns
        self.used += int(own * ns)
        self.idle += int(max(0.0, self.cores - own - others) * ns)
        return bool(self.lib.mpp_cores_are_taken(self.load, self.now, self.used, self.idle if tells_idle else -1))


@pytest.mark.parametrize(
    ("share", "cores", "own", "others", "is_taken"),
    [
        (1, 2, 1.0, 1.0, True),  # two ranks that compute on two cores
        (1, 2, 0.05, 0.05, False),  # the same two asleep, as while a device computes
        (1, 2, 0.6, 0.3, True),  # more than half of a rank's only core: a thread more would take it from this one
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


def test_others_that_come(shim) -> None:
    group = shim.ffi.new("mpp_inline *")
    assert calls(shim, group, lambda number: True) == list(range(1000))


def test_others_that_come_again(shim) -> None:
    """One call in time, and the next are tried at once."""
    polled = calls(shim, shim.ffi.new("mpp_inline *"), lambda number: number >= 100)
    assert polled[:7] == [0, 1, 4, 11, 26, 57, 120]
    assert polled[7:] == list(range(121, 1000))


def test_one_that_is_late_now_and_then(shim) -> None:
    """A single miss costs nothing but itself."""
    polled = calls(shim, shim.ffi.new("mpp_inline *"), lambda number: number % 10 != 0)
    assert polled == list(range(1000))
