"""What ``mpiplus bench --train`` finds: shares of a step, as plain data and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .results import comparisons

#: How far two backends' losses may lie apart, as a part of the loss: sums are taken in other orders.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
#: How far two ranks' parameters may, as a part of the way that training has taken them.
_DRIFT = 1e-2

#: Fewer do not tell how much they differ.
_FEWEST_TURNS = 3

_LEGEND = (
    "alone: a step that does all but communicate. all_reduce: those of all buckets, with nothing else to do. waiting: "
    "the part of a step by which it is longer than one alone. overlap: the part of the all_reduce's time that a step "
    "does not get longer by; unclear where turns differ by more. ±: the median distance of a turn from the median."
)


@dataclass(frozen=True)
class Trained:
    """One network of one dtype, trained on one backend. The turns' times are in seconds, those of the slowest rank.

    Attributes:
        samples: what all ranks together take in one step.
        step: a step, by turn.
        alone: a step that does all but communicate, in the same turn.
        all_reduce: the all_reduce of all buckets, in the same turn.
        losses: of all ranks, in the first steps.
    """

    samples: int
    step: Sequence[float]
    alone: Sequence[float]
    all_reduce: Sequence[float]
    losses: Sequence[float]

    @property
    def samples_per_second(self) -> float:
        """All ranks' together, in the median turn."""
        return self.samples / statistics.median(self.step)

    @property
    def _longer(self) -> list[float]:
        return [step - alone for step, alone in zip(self.step, self.alone, strict=True)]

    @property
    def exposed(self) -> float:
        """By how many seconds a step is longer than one alone: the median of the turns, which may be below 0."""
        return statistics.median(self._longer)

    @property
    def spread(self) -> float:
        """The median distance of a turn from that, in seconds."""
        return statistics.median(abs(longer - self.exposed) for longer in self._longer)

    @property
    def overlap_is_clear(self) -> bool:
        """Whether steps are alike enough to tell what an all_reduce adds to them."""
        return len(self.step) >= _FEWEST_TURNS and self.spread < statistics.median(self.all_reduce)

    @property
    def waiting(self) -> float:
        """The part of a step that is spent waiting: 0 to 1."""
        return _within_one(self.exposed / statistics.median(self.step))

    @property
    def overlap(self) -> float:
        """The part of the all_reduce's time that is hidden behind the step's own work: 0 to 1."""
        return _within_one(1 - self.exposed / statistics.median(self.all_reduce))

    def to_json(self) -> dict[str, Any]:
        """Return all figures, and every turn, as plain data."""
        medians = {name: statistics.median(getattr(self, name)) for name in ("step", "alone", "all_reduce")}
        return {
            "samples_per_second": self.samples_per_second,
            **{f"{name}_seconds": seconds for name, seconds in medians.items()},
            "exposed_seconds": self.exposed,
            "exposed_spread_seconds": self.spread,
            "waiting_share": self.waiting,
            "overlap_share": self.overlap,
            "overlap_is_clear": self.overlap_is_clear,
            "losses": list(self.losses),
            "turns_seconds": {name: list(getattr(self, name)) for name in medians},
        }

    def cells(self) -> list[str]:
        """Return the figures as they stand in the table."""
        step, all_reduce = statistics.median(self.step), statistics.median(self.all_reduce)
        overlap = f"{100 * self.overlap:.0f} ±{100 * self.spread / all_reduce:.0f} %"
        return [
            *(f"{1e3 * statistics.median(turns):.2f}" for turns in (self.step, self.alone, self.all_reduce)),
            f"{100 * self.waiting:.1f} ±{100 * self.spread / step:.1f} %",
            overlap if self.overlap_is_clear else "unclear",
        ]


def _within_one(share: float) -> float:
    return min(1.0, max(0.0, share))


@dataclass(frozen=True)
class Row:
    """One network of one dtype on all backends.

    Attributes:
        model, dtype: their names.
        buckets: bytes of each of DDP's.
        trained: by backend, the one of interest first.
    """

    model: str
    dtype: str
    buckets: Sequence[int]
    trained: Mapping[str, Trained]

    def ratios(self) -> dict[str, float]:
        """Return how many times as many samples per second the first backend trains as each other one."""
        speed = {name: trained.samples_per_second for name, trained in self.trained.items()}
        return {f"{first}/{other}": speed[first] / speed[other] for other, first in comparisons(list(self.trained))}

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "bucket_bytes": list(self.buckets),
            "ratio": self.ratios(),
            "backends": {name: trained.to_json() for name, trained in self.trained.items()},
        }


def what_is_wrong(losses: Mapping[str, Sequence[float]], drifts: Mapping[str, float], dtype: str) -> str:
    """Say why these are not the first steps of one training on several backends; empty if they are.

    Args:
        losses: by backend, the mean of all ranks' losses at each step.
        drifts: by backend, how far any rank's parameters are from rank 0's, as a part of the way that they came.
        dtype: the name of the dtype.
    """
    for name, found in losses.items():
        if not all(map(math.isfinite, found)) or not found[-1] < found[0]:
            return f"on {name} the loss does not fall: {_told(found)}"
        if not drifts[name] <= _DRIFT:
            return f"on {name} the ranks' parameters drift apart: by {drifts[name]:.2g} of the way that they came"
    first, *others = losses
    for other in others:
        pairs = zip(losses[first], losses[other], strict=True)
        if not all(math.isclose(one, two, rel_tol=TOLERANCE[dtype]) for one, two in pairs):
            return f"{first} and {other} train differently: losses {_told(losses[first])}, and {_told(losses[other])}"
    return ""


def _told(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print all rows as one table, with what its columns mean."""
    table = Table(box=box.SIMPLE_HEAD)
    pairs = list(rows[0].ratios())
    titles = (
        "model",
        "dtype",
        "backend",
        "samples/s",
        *pairs,
        "step ms",
        "alone ms",
        "all_reduce ms",
        "waiting",
        "overlap",
    )
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index > 2 else "left", no_wrap=True)
    for row in rows:
        ratios = [f"{ratio:.2f}" for ratio in row.ratios().values()]
        for name, trained in row.trained.items():
            speed = f"{trained.samples_per_second:,.0f}"
            table.add_row(row.model, row.dtype, name, speed, *ratios, *trained.cells())
            ratios = [""] * len(pairs)
        table.add_section()
    console.print("\ntraining with DistributedDataParallel, medians of the turns, times of the slowest rank")
    console.print(table)
    console.print(_LEGEND)
