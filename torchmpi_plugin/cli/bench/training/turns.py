"""Turns of training steps: how long a step takes, and what it costs in processor time and context switches."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..measure import Call, Ranks, calls_per_block


class Usage(NamedTuple):
    """Counters of the operating system for a process with all its threads, as differences or means."""

    cpu_seconds: float  # processor time, that of the kernel on its behalf included
    voluntary: float  # context switches because a thread waited for something
    involuntary: float  # because another thread was given the core


class CountingRanks(Ranks, Protocol):
    """The ranks that measure together, as the timer needs them."""

    def means(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all ranks of each of ``values``, on every rank."""


@dataclass
class Turns:
    """The turns of one contestant."""

    seconds: list[float] = field(default_factory=list)  # a call on the slowest rank, by turn
    usage: list[Usage] = field(default_factory=list)  # of a call, the mean of the ranks, by turn

    def medians(self) -> dict[str, float]:
        """Return the median turn's figures, by name."""
        return {name: statistics.median(turns) for name, turns in self.to_json().items()}

    def to_json(self) -> dict[str, list[float]]:
        """Return every turn as plain data."""
        found = {"seconds": list(self.seconds)}
        return found | {name: [getattr(usage, name) for usage in self.usage] for name in Usage._fields}


def used() -> Usage:
    """Return what this process has used until now."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(found.ru_utime + found.ru_stime, found.ru_nvcsw, found.ru_nivcsw)


def take_turns(
    contestants: Mapping[str, Call], repeats: int, block_seconds: float, ranks: CountingRanks
) -> dict[str, Turns]:
    """Time contestants in turns; each turn begins with another one, so that none always follows the same.

    Returns:
        The turns of each contestant, under its name; the same on every rank.
    """
    calls = {name: calls_per_block(call, block_seconds, ranks) for name, call in contestants.items()}
    turns = {name: Turns() for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            _add_turn(turns[name], contestants[name], calls[name], ranks)
    return turns


def _add_turn(turns: Turns, call: Call, calls: int, ranks: CountingRanks) -> None:
    call()  # outside the clock: the one before may have left other things in the caches
    ranks.synchronise()
    before, start = used(), time.perf_counter()
    for _ in range(calls):
        call()
    seconds, after = time.perf_counter() - start, used()
    turns.seconds.append(ranks.slowest(seconds) / calls)
    own = [(end - begin) / calls for begin, end in zip(before, after, strict=True)]
    turns.usage.append(Usage(*ranks.means(own)))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers, which a ratio and its inverse agree on."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
