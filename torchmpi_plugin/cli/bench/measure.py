"""A small interleaved timer for operations that several ranks carry out together.

Contestants that do the same work take turns (A B C A B C ...), so that a disturbance of the machine hits all
of them alike. Each turn is a block of calls long enough for the clock; its time is that of the slowest rank.
What is compared in the end are medians over the turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Call = Callable[[], object]

_MAX_CALLS = 100_000


class Ranks(Protocol):
    """The ranks that measure together, as the timer needs them."""

    def synchronise(self) -> None:
        """Return on no rank before every rank has called."""

    def slowest(self, seconds: float) -> float:
        """Return the largest ``seconds`` of all ranks, on every rank."""


@dataclass
class Timing:
    """The turns of one contestant."""

    calls: int  # how many calls each turn consisted of
    seconds: list[float] = field(default_factory=list)  # the time per call of each turn, in seconds

    @property
    def median(self) -> float:
        """The median time per call, in seconds."""
        return statistics.median(self.seconds)


def time_block(call: Call, calls: int, ranks: Ranks) -> float:
    """Return the seconds that ``calls`` calls take on the slowest rank, after one call outside the clock."""
    call()
    ranks.synchronise()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return ranks.slowest(time.perf_counter() - start)


def calls_per_block(call: Call, block_seconds: float, ranks: Ranks) -> int:
    """Return how many calls fill ``block_seconds``; the answer is the same on every rank."""
    calls = 1
    while calls < _MAX_CALLS:
        seconds = time_block(call, calls, ranks)
        if seconds >= block_seconds / 4:
            return min(_MAX_CALLS, max(1, math.ceil(calls * block_seconds / seconds)))
        calls *= 8
    return _MAX_CALLS


def interleave(contestants: Mapping[str, Call], repeats: int, block_seconds: float, ranks: Ranks) -> dict[str, Timing]:
    """Time contestants in turns.

    Returns:
        The turns of each contestant, under its name; the same on every rank.
    """
    timings = {name: Timing(calls_per_block(call, block_seconds, ranks)) for name, call in contestants.items()}
    for _ in range(repeats):
        for name, call in contestants.items():
            timing = timings[name]
            timing.seconds.append(time_block(call, timing.calls, ranks) / timing.calls)
    return timings
