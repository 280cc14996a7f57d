"""A small interleaved timer for operations that several ranks carry out together.

Contestants that do the same work take turns (A B C B C A ...), so that a disturbance of the machine hits all of them
alike, and none always follows the same. Each turn is a block of calls long enough for the clock; its time is that of
the slowest rank. What is compared in the end are medians over the turns.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Call = Callable[[], object]

_MAX_CALLS = 100_000


class Ranks(Protocol):
    """The ranks that measure together, as the timer needs them: ``Session`` says what each does."""

    def synchronise(self) -> None: ...
    def settle(self) -> None: ...
    def slowest(self, seconds: float) -> float: ...
    def means(self, values: Sequence[float]) -> list[float]: ...


class Turns(dict[str, list[float]]):
    """The turns of a contestant: of a call "seconds" on the slowest rank, and what it uses, the mean of the ranks."""

    @property
    def median(self) -> float:
        return statistics.median(self["seconds"])

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(turns) for name, turns in self.items()}


def used() -> dict[str, float]:
    """Return what this process with all its threads has used until now.

    Returns:
        Processor time, that of the kernel on its behalf included; and how often a thread left a core: "voluntary",
        because it waited for something, and "involuntary", because another thread was given the core.
    """
    found = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_seconds": found.ru_utime + found.ru_stime, "voluntary": found.ru_nvcsw, "involuntary": found.ru_nivcsw}


def _time_block(call: Call, calls: int, ranks: Ranks) -> tuple[float, list[float]]:
    """Return the seconds that ``calls`` calls take on the slowest rank, and what they use on this one."""
    call()  # outside the clock: the one before may have left other things in the caches
    ranks.synchronise()
    before, start = used(), time.perf_counter()
    for _ in range(calls):
        call()
    ranks.settle()
    seconds, after = time.perf_counter() - start, used()
    return ranks.slowest(seconds), [after[name] - before[name] for name in before]


def calls_per_block(call: Call, block_seconds: float, ranks: Ranks) -> int:
    """Return how many calls fill ``block_seconds``; the answer is the same on every rank."""
    calls = 1
    while calls < _MAX_CALLS:
        seconds, _ = _time_block(call, calls, ranks)
        if seconds >= block_seconds / 4:
            return min(_MAX_CALLS, max(1, math.ceil(calls * block_seconds / seconds)))
        calls *= 8
    return _MAX_CALLS


def take_turns(contestants: Mapping[str, Call], repeats: int, block_seconds: float, ranks: Ranks) -> dict[str, Turns]:
    """Time contestants in turns, each round beginning with another one; the turns by name, the same on every rank."""
    calls = {name: calls_per_block(call, block_seconds, ranks) for name, call in contestants.items()}
    turns = {name: Turns({what: [] for what in ("seconds", *used())}) for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds, own = _time_block(contestants[name], calls[name], ranks)
            for of_what, one in zip(turns[name].values(), (seconds, *ranks.means(own)), strict=True):
                of_what.append(one / calls[name])
    return turns
