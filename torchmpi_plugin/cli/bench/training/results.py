"""Results of ``mpiplus bench --train``: shares of a step, as plain data and as a table."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..measure import Turns
from ..report import print_table
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

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """Return what follows from the turns, each of which is compared with its neighbour, as plain data."""
        pairs = list(zip(self.step["seconds"], self.alone["seconds"], strict=True))
        longer = [step - alone for step, alone in pairs]
        exposed = statistics.median(longer)  # below 0, where a step is shorter than one alone by chance
        spread = statistics.median(abs(seconds - exposed) for seconds in longer)
        all_reduce = self.all_reduce.median if self.all_reduce else None
        return {
            "samples_per_second": self.samples / self.step.median,
            "step_over_alone": statistics.median(step / alone for step, alone in pairs),
            "exposed_seconds": exposed,
            "exposed_spread_seconds": spread,
            "waiting_share": _within_one(exposed / self.step.median),
            "overlap_share": None if all_reduce is None else _within_one(1 - exposed / all_reduce),
            # Whether steps are alike enough to tell what an all_reduce adds to them.
            "overlap_is_clear": all_reduce is not None and len(longer) >= _FEWEST_TURNS and spread < all_reduce,
        }

    def to_json(self) -> dict[str, Any]:
        turns = {"step": self.step, "alone": self.alone, **({"all_reduce": self.all_reduce} if self.all_reduce else {})}
        return {
            **{f"{name}_{what}": found for name, one in turns.items() for what, found in one.medians().items()},
            **self.figures,
            "losses": self.losses,
            "turns": turns,
        }

    def cells(self) -> list[str]:
        figures, usage, alone = self.figures, self.step.medians(), self.alone.median
        spread, all_reduce = figures["exposed_spread_seconds"], self.all_reduce.median if self.all_reduce else None
        hidden = "-" if all_reduce is None else "unclear"
        if all_reduce and figures["overlap_is_clear"]:
            hidden = f"{100 * figures['overlap_share']:.0f} ±{100 * spread / all_reduce:.0f} %"
        return [
            f"{1e3 * self.step.median:.2f}",
            f"{1e3 * alone:.2f}",
            f"{figures['step_over_alone']:.2f} ±{spread / alone:.2f}",
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
        speed = {name: trained.figures["samples_per_second"] for name, trained in self.trained.items()}
        return {f"{first}/{other}": speed[first] / speed[other] for other, first in comparisons(list(self.trained))}

    def to_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "model": self.model,
            "dtype": self.dtype,
            "bucket_bytes": self.buckets,
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
    console.print("\ntraining, medians of the turns, times of the slowest rank")
    pairs = list(rows[0].ratios()) if rows else []
    if rows:
        titles = (
            *("way", "model", "dtype", "backend"),
            *(pair.replace("/", "/\n") for pair in pairs),
            *("step\nms", "alone\nms", "step/\nalone", "all_reduce\nms", "hidden", "switches", "cpu\nms"),
        )
        print_table(console, titles, 4, map(_cells, rows))
    for pair in pairs:
        mean = statistics.geometric_mean(row.ratios()[pair] for row in rows)
        console.print(f"{pair} in samples/s, geometric mean of the rows: {mean:.2f}\n")
    for way in WAYS:
        if any(row.way == way.name for row in rows):
            console.print(f"{way.name}: {way.about}")
    console.print(_LEGEND)
    for note in notes:
        console.print(note, markup=False)


def _cells(row: Row) -> Iterator[list[str]]:
    """Of each backend, in a line; the ratios stand in the first."""
    ratios = [f"{ratio:.2f}" for ratio in row.ratios().values()]
    for name, trained in row.trained.items():
        yield [row.way, row.model, row.dtype, name, *ratios, *trained.cells()]
        ratios = [""] * len(ratios)
