"""What ``mpiplus bench`` finds, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RAW = "raw"
"""The contestant that calls MPI through mpi4py, without torch.distributed."""

SMALL = 4096
"""Up to this many bytes an operation's time is latency, and a difference tells more than a ratio."""

OVERLAP_SIZE = 16 * 1024**2
"""Bytes of the asynchronous all_reduce."""

OVERLAP_SLEEP = 0.5
"""Seconds between its start and its ``wait()``."""


def comparisons(contestants: Sequence[str]) -> list[tuple[str, str]]:
    """Return which contestants to compare: the first backend with raw MPI, every other one with the first."""
    first, *others = [name for name in contestants if name != RAW]
    return [(first, RAW)] * (RAW in contestants) + [(other, first) for other in others]


@dataclass(frozen=True)
class Row:
    """The times of one operation on one dtype and size.

    Attributes:
        operation: the name of the operation.
        dtype: empty for an operation without data.
        size: bytes.
        us: the time per call by contestant, in microseconds; those that refused are missing.
        turns_us: the time per call of each turn, in microseconds.
        refusals: by contestant, why it does not do this.
    """

    operation: str
    dtype: str
    size: int
    us: Mapping[str, float]
    turns_us: Mapping[str, Sequence[float]]
    refusals: Mapping[str, str]

    def ratio(self, above: str, below: str) -> float | None:
        """Return how many times as long ``above`` takes as ``below``, or None if one of them is missing."""
        if above not in self.us or below not in self.us:
            return None
        return self.us[above] / self.us[below]

    def extra_us(self, contestant: str) -> float | None:
        """Return what ``contestant`` adds to raw MPI in microseconds, or None for large data."""
        if self.size > SMALL or contestant not in self.us or RAW not in self.us:
            return None
        return self.us[contestant] - self.us[RAW]

    def to_json(self, contestants: Sequence[str]) -> dict[str, Any]:
        """Return the row with its ratios and differences as plain data."""
        pairs = comparisons(contestants)
        return {
            "operation": self.operation,
            "dtype": self.dtype or None,
            "bytes": self.size,
            "us": dict(self.us),
            "turns_us": {name: list(turns) for name, turns in self.turns_us.items()},
            "ratio": {f"{above}/{below}": self.ratio(above, below) for above, below in pairs},
            "extra_us": {above: self.extra_us(above) for above, below in pairs if below == RAW},
        }


@dataclass(frozen=True)
class Overlap:
    """One contestant's asynchronous all_reduce while the caller does something else.

    Attributes:
        contestant: raw MPI, or a backend.
        sync_us: the time of the synchronous operation, in microseconds.
        wait_us: the time that ``wait()`` takes when the caller slept between start and wait, in microseconds.
    """

    contestant: str
    sync_us: float
    wait_us: float

    @property
    def percent(self) -> float:
        """The part of the operation that was left to ``wait()``, in percent."""
        return 100 * self.wait_us / self.sync_us

    def to_json(self) -> dict[str, Any]:
        """Return the times and the percentage as plain data."""
        return {
            "contestant": self.contestant,
            "sync_us": self.sync_us,
            "wait_us": self.wait_us,
            "percent": self.percent,
        }
