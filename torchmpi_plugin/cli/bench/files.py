"""The files that ``mpiplus bench`` writes: numbers, a choice of collectives, a picture. matplotlib is an extra."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ...mpi import runtime
from . import tune
from .results import FRONT_END, Report, Row, format_size
from .training.results import Row as Trainings

#: Styles of the lines for what is measured beside the operations.
_LIMITS = (":", "-.")
_INCHES, _DOTS_PER_INCH = (10.0, 2.5), 72


@dataclass(frozen=True)
class Files:
    """Files that rank 0 writes, and what goes into each."""

    json: Path | None  # every number
    plot: Path | None  # the picture
    tuning: Path | None  # which collectives are faster; where it is given that is what the benchmark measures
    device: str = "cpu"  # where the tensors are

    def why_not(self, nodes: Sequence[str]) -> str:
        """Say why something could not be written after minutes of measuring, and nothing where all is well."""
        for path in filter(None, (self.json, self.plot, self.tuning)):
            if not path.parent.is_dir():
                return f"{path} cannot be written: there is no directory {path.parent}"
        if self.plot:
            try:
                import matplotlib  # noqa: F401
            except ImportError as error:
                return f"--plot needs matplotlib ({error}): pip install matplotlib"
        return tune.why_not(nodes, self.device) if self.tuning else ""

    def write(self, report: Report, nodes: Sequence[str], console: Console) -> None:
        if self.json:
            self.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        if self.plot:
            draw(report, self.plot)
        if self.tuning:
            tuning = tune.choose(report.rows, nodes, runtime.mpi().get_vendor(), self.device)
            self.tuning.write_text(tune.keeping(tuning, self.tuning).text())
            console.print(tune.in_words(tuning, self.tuning), soft_wrap=True, markup=False)  # a path


def draw(report: Report, path: Path) -> None:
    """Write a picture: for each operation on data its times and bandwidths against the size."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((row.operation, row.dtype) for row in report.rows if row.size))
    # Not pyplot, which looks for a screen.
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(kinds) + 1), layout="constrained")
    all_axes = figure.subplots(max(1, len(kinds)), 2, squeeze=False)
    for kind, (latency, bandwidth) in zip(kinds, all_axes, strict=False):
        rows = [row for row in report.rows if (row.operation, row.dtype) == kind]
        _draw_lines(latency, report, rows, "us per call", lambda row, name: row.us.get(name), "latency_us")
        _draw_lines(bandwidth, report, rows, "bus bandwidth, GB/s", Row.bus_gb_per_s, "gb_per_s")
        latency.set_title(" ".join(kind), loc="left", fontsize="medium")
    title = "\n".join((_facts_in_words(report.facts), *(limit.in_words() for limit in report.limits().values())))
    figure.suptitle(title, fontsize="medium")
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def draw_training(rows: Sequence[Trainings], facts: Mapping[str, str | int], path: Path) -> None:
    """Write a picture: for each way to train a bar for a step alone, and one for a step on each backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES[0], 1.5 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = ["alone", *dict.fromkeys(name for row in rows for name in row.trained)]
    for number, name in enumerate(names):
        places = [at + 0.8 * (number + 0.5) / len(names) - 0.4 for at in range(len(rows))]
        found = [next(iter(row.trained.values())) if name == "alone" else row.trained.get(name) for row in rows]
        steps = [one and (one.alone if name == "alone" else one.step) for one in found]
        ms = [1e3 * step.median if step else 0.0 for step in steps]
        bars = axes.barh(places, ms, 0.8 / len(names), label=name)
        axes.bar_label(bars, fmt=lambda ms: f"{ms:.1f}" if ms else "", padding=2, fontsize="small")
    axes.set_yticks(range(len(rows)), [f"{row.way}, {row.model} of {row.dtype}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    figure.suptitle(_facts_in_words(facts), fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _facts_in_words(facts: Mapping[str, str | int]) -> str:
    names = ("ranks", "nodes", "MPI", "torch", "torchmpi-plugin", "processor", "device of rank 0")
    return ", ".join(f"{name} {facts[name]}" for name in names if name in facts)


def _draw_lines(
    axes: Any,
    report: Report,
    rows: Sequence[Row],
    what: str,
    value_of: Callable[[Row, str], float | None],
    of_limit: str,
) -> None:
    """Draw a line for each contestant, and one for each limit, whose attribute ``of_limit`` is the same figure."""
    from matplotlib.ticker import FuncFormatter

    for name in report.contestants:
        known = [(row.size, value) for row in rows if (value := value_of(row, name)) is not None]
        # Drawn also where it is empty: the next contestant keeps its colour, and the legend is that of all.
        style = "--" if name == FRONT_END else "-"
        axes.plot([size for size, _ in known], [value for _, value in known], style, marker=".", label=name)
    for (name, limit), style in zip(report.limits().items(), _LIMITS, strict=False):
        axes.axhline(getattr(limit, of_limit), color="0.4", linestyle=style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size)) if size >= 1 else ""))
    axes.set_xticks([row.size for row in rows])
    axes.minorticks_off()
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
