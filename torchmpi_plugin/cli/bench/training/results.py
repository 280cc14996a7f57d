"""Results of ``mpiplus bench --train``: shares of a step, as plain data and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..measure import Turns
from ..report import new_table, print_table
from ..results import comparisons
from .ways import WAYS

#: How far two backends' losses may lie apart, as a part of the loss: sums are taken in other orders.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
#: How far two ranks' parameters may, as a part of the way that training has taken them.
_DRIFT = 1e-2

#: Fewer do not tell how much they differ.
_FEWEST_TURNS = 3

_LEGEND = (
    "step, alone: a step, and one that does all but communicate. all_reduce: those of all buckets of DDP, with nothing "
    "else to do. hidden: the part of the all_reduce's time that a step does not get longer by; unclear where turns "
    "differ by more. ±: the median distance of a turn from the median. switches: context switches of a rank in a step, "
    "voluntary + involuntary. cpu: processor time of a rank in a step, all its threads'. Losses agree within "
    + ", ".join(f"{tolerance:g} ({dtype})" for dtype, tolerance in TOLERANCE.items())
    + " of the loss."
)


@dataclass(frozen=True)
class Trained:
    """One network of one dtype, trained in one way on one backend."""

    samples: int  # what all ranks together take in one step
    step: Turns  # a step, by turn
    alone: Turns  # a step that does all but communicate, in the same turns
    all_reduce: Turns | None  # the all_reduce of all buckets, in the same turns; None where there are no buckets
    losses: Sequence[float]  # of all ranks, in the first steps

    @property
    def samples_per_second(self) -> float:
        """All ranks' together, in the median turn."""
        return self.samples / self.step.median

    @property
    def over_alone(self) -> float:
        """Ratio of a step's time to that of one alone: the median of the turns."""
        pairs = zip(self.step.seconds, self.alone.seconds, strict=True)
        return statistics.median(step / alone for step, alone in pairs)

    @property
    def _longer(self) -> list[float]:
        return [step - alone for step, alone in zip(self.step.seconds, self.alone.seconds, strict=True)]

    @property
    def exposed(self) -> float:
        """By how many seconds a step is longer than one alone: the median of the turns, which may be below 0."""
        return statistics.median(self._longer)

    @property
    def spread(self) -> float:
        """The median distance of a turn from that, in seconds."""
        return statistics.median(abs(longer - self.exposed) for longer in self._longer)

    @property
    def _all_reduce_seconds(self) -> float | None:
        return self.all_reduce.median if self.all_reduce else None

    @property
    def overlap_is_clear(self) -> bool:
        """True if steps are alike enough to tell what an all_reduce adds to them."""
        all_reduce = self._all_reduce_seconds
        return all_reduce is not None and len(self.step.seconds) >= _FEWEST_TURNS and self.spread < all_reduce

    @property
    def waiting(self) -> float:
        """The part of a step that is spent waiting: 0 to 1."""
        return _within_one(self.exposed / self.step.median)

    @property
    def overlap(self) -> float | None:
        """The part of the all_reduce's time that is hidden behind the step's own work: 0 to 1."""
        all_reduce = self._all_reduce_seconds
        return None if all_reduce is None else _within_one(1 - self.exposed / all_reduce)

    def to_json(self) -> dict[str, Any]:
        """Return all figures, and every turn, as plain data."""
        turns = {"step": self.step, "alone": self.alone, **({"all_reduce": self.all_reduce} if self.all_reduce else {})}
        medians = {name: found.medians() for name, found in turns.items()}
        return {
            "samples_per_second": self.samples_per_second,
            **{f"{name}_{what}": figure for name, found in medians.items() for what, figure in found.items()},
            "step_over_alone": self.over_alone,
            "exposed_seconds": self.exposed,
            "exposed_spread_seconds": self.spread,
            "waiting_share": self.waiting,
            "overlap_share": self.overlap,
            "overlap_is_clear": self.overlap_is_clear,
            "losses": list(self.losses),
            "turns": {name: found.to_json() for name, found in turns.items()},
        }

    def cells(self) -> list[str]:
        all_reduce, usage = self._all_reduce_seconds, self.step.medians()
        hidden = "-" if all_reduce is None or self.overlap is None else "unclear"
        if self.overlap_is_clear and all_reduce and self.overlap is not None:
            hidden = f"{100 * self.overlap:.0f} ±{100 * self.spread / all_reduce:.0f} %"
        return [
            f"{1e3 * self.step.median:.2f}",
            f"{1e3 * self.alone.median:.2f}",
            f"{self.over_alone:.2f} ±{self.spread / self.alone.median:.2f}",
            "-" if all_reduce is None else f"{1e3 * all_reduce:.2f}",
            hidden,
            f"{usage['voluntary']:.0f} + {usage['involuntary']:.0f}",
            f"{1e3 * usage['cpu_seconds']:.1f}",
        ]


def _within_one(share: float) -> float:
    return min(1.0, max(0.0, share))


@dataclass(frozen=True)
class Row:
    """One network of one dtype, trained in one way on all backends."""

    #: their names
    way: str
    model: str
    dtype: str
    buckets: Sequence[int]  # bytes of each of DDP's
    trained: Mapping[str, Trained]  # by backend, the one of interest first

    def ratios(self) -> dict[str, float]:
        """Return how many times as many samples per second the first backend trains as each other one."""
        speed = {name: trained.samples_per_second for name, trained in self.trained.items()}
        return {f"{first}/{other}": speed[first] / speed[other] for other, first in comparisons(list(self.trained))}

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "way": self.way,
            "model": self.model,
            "dtype": self.dtype,
            "bucket_bytes": list(self.buckets),
            "ratio": self.ratios(),
            "loss_tolerance": TOLERANCE[self.dtype],
            "backends": {name: trained.to_json() for name, trained in self.trained.items()},
        }


def what_is_wrong(losses: Mapping[str, Sequence[float]], drifts: Mapping[str, float], dtype: str) -> str:
    """Say why these are not the first steps of one training on several backends; empty if they are."""
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


def print_rows(console: Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Print all rows as one table, with what its columns mean, and the notes."""
    console.print("\ntraining, medians of the turns, times of the slowest rank")
    if rows:
        print_table(console, _table(rows))
    for pair in rows[0].ratios() if rows else ():
        mean = statistics.geometric_mean(row.ratios()[pair] for row in rows)
        console.print(f"{pair} in samples/s, geometric mean of the rows: {mean:.2f}\n")
    for way in WAYS:
        if any(row.way == way.name for row in rows):
            console.print(f"{way.name}: {way.about}")
    console.print(_LEGEND)
    for note in notes:
        console.print(note, markup=False)


def _table(rows: Sequence[Row]) -> Table:
    pairs = list(rows[0].ratios())
    titles = (
        *("way", "model", "dtype", "backend"),
        *(pair.replace("/", "/\n") for pair in pairs),
        *("step\nms", "alone\nms", "step/\nalone", "all_reduce\nms", "hidden", "switches", "cpu\nms"),
    )
    table = new_table(titles, texts=4)
    for row in rows:
        ratios = [f"{ratio:.2f}" for ratio in row.ratios().values()]
        for name, trained in row.trained.items():
            table.add_row(row.way, row.model, row.dtype, name, *ratios, *trained.cells())
            ratios = [""] * len(pairs)
        table.add_section()
    return table
