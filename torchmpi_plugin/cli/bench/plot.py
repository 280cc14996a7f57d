"""Measurements of ``mpiplus bench`` as a picture. Needs matplotlib, which is an extra."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .report import Report, in_words
from .results import FRONT_END, Row
from .sizes import format_size
from .training.results import Row as Trainings

_INCHES, _DOTS_PER_INCH = (10.0, 2.5), 72


def draw(report: Report, path: Path) -> None:
    """Write a picture: for each operation on data its times and bandwidths against the size.

    Raises:
        OSError: the file cannot be written.
    """
    kinds = list(dict.fromkeys((row.operation, row.dtype) for row in report.rows if row.size))
    # Not pyplot, which looks for a screen.
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(kinds) + 1), layout="constrained")
    all_axes = figure.subplots(max(1, len(kinds)), 2, squeeze=False)
    for kind, (latency, bandwidth) in zip(kinds, all_axes, strict=False):
        rows = [row for row in report.rows if (row.operation, row.dtype) == kind]
        _draw_latency(latency, report, rows)
        _draw_bandwidth(bandwidth, report, rows)
        latency.set_title(" ".join(kind), loc="left", fontsize="medium")
    figure.suptitle(_title(report), fontsize="medium")
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def draw_training(rows: Sequence[Trainings], facts: Mapping[str, str | int], path: Path) -> None:
    """Write a picture: for each way to train a bar for a step alone, and one for a step on each backend.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(_INCHES[0], 1.5 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = ["alone", *dict.fromkeys(name for row in rows for name in row.trained)]
    for number, name in enumerate(names):
        places = [at + 0.8 * (number + 0.5) / len(names) - 0.4 for at in range(len(rows))]
        seconds = [_step_seconds(row, name) for row in rows]
        bars = axes.barh(places, [1e3 * it for it in seconds], 0.8 / len(names), label=name)
        axes.bar_label(bars, fmt=lambda ms: f"{ms:.1f}" if ms else "", padding=2, fontsize="small")
    axes.set_yticks(range(len(rows)), [f"{row.way}, {row.model} of {row.dtype}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    figure.suptitle(_facts_in_words(facts), fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _step_seconds(row: Trainings, name: str) -> float:
    """0: not measured."""
    if name == "alone":
        return statistics.median(next(iter(row.trained.values())).alone.seconds)
    return row.trained[name].seconds if name in row.trained else 0.0


def _facts_in_words(facts: Mapping[str, str | int]) -> str:
    names = ("ranks", "nodes", "MPI", "torch", "torchmpi-plugin", "processor")
    return ", ".join(f"{name} {facts[name]}" for name in names if name in facts)


def _title(report: Report) -> str:
    facts = _facts_in_words(report.facts)
    return facts if report.link is None else f"{facts}\n{in_words(report.link)}"


def _draw_latency(axes: Axes, report: Report, rows: Sequence[Row]) -> None:
    for name in report.contestants:
        _draw_line(axes, name, [(row.size, row.us.get(name)) for row in rows])
    if report.link:
        axes.axhline(report.link.latency_us, color="0.4", linestyle=":", label="plain messages")
    _finish(axes, "us per call", rows)


def _draw_bandwidth(axes: Axes, report: Report, rows: Sequence[Row]) -> None:
    for name in report.contestants:
        _draw_line(axes, name, [(row.size, row.bus_gb_per_s(name)) for row in rows])
    if report.link:
        axes.axhline(report.link.gb_per_s, color="0.4", linestyle=":")
    _finish(axes, "bus bandwidth, GB/s", rows)


def _draw_line(axes: Axes, name: str, points: Sequence[tuple[int, float | None]]) -> None:
    known = [(size, value) for size, value in points if value is not None]
    # Drawn also where it is empty: the next contestant keeps its colour, and the legend is that of all.
    style = "--" if name == FRONT_END else "-"
    axes.plot([size for size, _ in known], [value for _, value in known], style, marker=".", label=name)


def _finish(axes: Axes, what: str, rows: Sequence[Row]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size)) if size >= 1 else ""))
    axes.set_xticks([row.size for row in rows])
    axes.minorticks_off()
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
