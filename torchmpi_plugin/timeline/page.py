"""A job as one page of HTML, with plotly and its script in it, so that it needs no network. Imports plotly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..names import counted
from .operations import Job, Numbers

#: So many of the longest slices of a kind are drawn: more and a browser takes minutes.
_MOST = 5_000
_PARTS = 100
_COLOURS = {"waits": "#d62728", "moves": "#1f77b4", "complete, not yet asked for": "#c7c7c7"}
_PLAIN = {"color": "black", "dash": "dash"}
_TITLES = (
    "Ranks over time (ms): drag to zoom; when C++ began to wait for a future, as in DDP, is not seen",
    *("Waited for a rank, all others together (s)", "Seconds by operation and size"),
)
_STEPS = "Share of time in communication, by steps of the optimizer"
_NO_STEPS = "Share of time in communication, by hundredths of the time: of an optimizer no steps are known"
_BANDWIDTH = "Bytes of a call by seconds while it moves: median by size"


def write(job: Job, path: Path) -> None:
    ranks = len(job.ranks)
    common = _common_steps(job)
    titles = (*_TITLES, _STEPS if len(common) else _NO_STEPS, f"{_BANDWIDTH}<br>{_reached_in_words(job)}")
    figure = make_subplots(5, 1, subplot_titles=titles, vertical_spacing=0.07, row_heights=[0.4, *[0.15] * 4])
    parts = (_timeline(job), _waited_for(job), _by_size(job), _shares(job, common), _bandwidth(job))
    for row, traces in enumerate(parts, 1):
        for trace in traces:
            figure.add_trace(trace, row, 1)
    figure.update_layout(title=_title(job), barmode="stack", height=1500 + 20 * min(ranks, 100), hovermode="closest")
    ticks = {"title": "rank", "dtick": max(1, ranks // 16)}
    figure.update_yaxes(**ticks, autorange="reversed", row=1, col=1)
    figure.update_xaxes(**ticks, row=2, col=1)
    figure.update_xaxes(title="step" if len(common) else "ms", row=4, col=1)
    figure.update_xaxes(title="bytes", type="log", row=5, col=1)
    figure.update_yaxes(type="log", row=5, col=1)
    figure.write_html(path, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})


def _title(job: Job) -> str:
    errors = [error for error in job.errors.values() if error is not None]
    clocks = f"within {max(errors) / 1000:.0f} us" if len(errors) == len(job.errors) else "not all compared"
    dropped = sum(job.dropped.values())
    title = f"{counted(len(job.begun), 'operation')} of {counted(len(job.ranks), 'rank')}"
    title += f"; clocks of nodes {clocks}" if len(job.errors) > 1 else ""
    return title + (f"; {dropped} calls before them are not recorded any more" if dropped else "")


def _timeline(job: Job) -> Iterator[Any]:
    """A line for each slice, one trace for all of a kind: with gaps, which is much faster than one trace each."""
    end = np.maximum(job.complete, job.asked)
    names = job.of_kinds("name")
    for part, begin, until in zip(
        _COLOURS, (job.begun, job.came, job.complete), (job.came, job.complete, end), strict=True
    ):
        longest = np.argsort(begin - until, kind="stable")[:_MOST]
        longest = longest[until[longest] > begin[longest]]
        points = (np.stack([begin[longest], until[longest], until[longest]], 1) - job.start) / 1e6
        points[:, 2] = np.nan
        texts = [
            f"{names[at]} {job.sequence[at]} of {job.bytes[at]} bytes, {part}"
            + (f" for rank {job.last[at]}" if part == "waits" else "")
            for at in longest.tolist()
        ]
        more = " (the longest)" if len(longest) == _MOST else ""
        lines = {"x": points.ravel(), "y": np.repeat(job.rank[longest], 3), "text": np.repeat(texts, 3)}
        look = {"mode": "lines", "line": {"color": _COLOURS[part], "width": 8}, "hoverinfo": "text+x"}
        yield go.Scatter(**lines, **look, name=part + more)


def _waited_for(job: Job) -> Iterator[Any]:
    known = job.last >= 0
    seconds = np.bincount(job.last[known], job.waits[known] / 1e9, len(job.ranks))
    yield go.Bar(x=np.arange(len(seconds)), y=seconds, marker_color=_COLOURS["waits"], showlegend=False)


def _sizes(job: Job) -> Numbers:
    """The power of two that is not less."""
    return 2 ** np.ceil(np.log2(np.maximum(job.bytes, 1))).astype("i8")


def _by_size(job: Job) -> Iterator[Any]:
    names = job.of_kinds("name")
    labels = np.array([f"{name}, {size}" for name, size in zip(names, _sizes(job).tolist(), strict=True)])
    different, which = np.unique(labels, return_inverse=True)
    for part, spent in (("waits", job.waits), ("moves", job.complete - job.came)):
        seconds = np.bincount(which, spent / 1e9, len(different))
        yield go.Bar(x=different, y=seconds, marker_color=_COLOURS[part], showlegend=False, name=part)


def _common_steps(job: Job) -> Numbers:
    """The numbers of the steps that all ranks have which have some; empty: no two of them."""
    some = [numbers for numbers, _ in job.steps.values() if len(numbers)]
    first, last = max((each[0] for each in some), default=0), min((each[-1] for each in some), default=0)
    return np.arange(first, last + 1) if last > first else np.zeros(0, "i8")


def _shares(job: Job, common: Numbers) -> Iterator[Any]:
    """In each step, or part of the time, of all ranks: that in which an operation was under way, and waited."""
    edges = {
        rank: times[np.isin(numbers, common)] if len(common) else _parts(job)
        for rank, (numbers, times) in job.steps.items()
        if len(numbers) or not len(common)
    }
    x = common[1:] if len(common) else (_parts(job)[:-1] - job.start) / 1e6
    for name, until, part in (("in communication", job.complete, "moves"), ("waiting", job.came, "waits")):
        shares = [
            _covered(job.begun[mine], until[mine], own) / np.maximum(np.diff(own), 1)
            for mine, own in ((job.rank == rank, own) for rank, own in edges.items())
        ]
        line = {"color": _COLOURS[part], "shape": "hvh" if len(common) else "hv"}
        yield go.Scatter(x=x, y=np.mean(shares, axis=0), name=name, line=line)


def _parts(job: Job) -> Numbers:
    return np.linspace(job.start, max(int(job.complete.max(initial=0)), job.start + 1), _PARTS + 1)


def _covered(begun: Numbers, until: Numbers, edges: Numbers) -> Numbers:
    """For how long in each part one of them was under way, at least."""
    order = np.argsort(begun)
    until = np.maximum.accumulate(np.maximum(begun, until)[order])
    begun = np.maximum(begun[order], np.concatenate([[0], until[:-1]]))  # without what those before it cover
    done = np.cumsum(until - begun)
    at, covered = (np.stack(ends, 1).ravel() for ends in ((begun, until), (done - (until - begun), done)))
    return np.diff(np.interp(edges, at, covered)) if len(at) else np.zeros(len(edges) - 1)


def _reached_in_words(job: Job) -> str:
    if not job.reached:
        return "Plain messages are measured when a job ends, so not here"
    return f"Plain messages: rank 0 with {job.reached['with']} when the job ended, from Python, the fastest of 5"


def _bandwidth(job: Job) -> Iterator[Any]:
    names, sizes, spent = job.of_kinds("name"), _sizes(job), job.complete - job.came
    plain = {int(size): int(size) / ns * 1e9 for size, ns in job.reached.get("messages", {}).items()}
    plain_sizes, plain_speeds = list(plain), list(plain.values())
    for name in np.unique(names):
        mine = (names == name) & (spent > 0) & (job.bytes > 0) & ~job.is_open
        x = np.unique(sizes[mine])
        y = [float(np.median((job.bytes / spent)[mine & (sizes == size)]) * 1e9) for size in x]
        shares = np.array(y) / np.interp(np.log(x), np.log(plain_sizes), plain_speeds) if plain else np.zeros(0)
        texts = [f"{share:.0%} of plain messages" for share in shares]
        if len(x):
            yield go.Scatter(x=x, y=y, text=texts, name=str(name), mode="lines+markers")
    if plain:
        yield go.Scatter(x=plain_sizes, y=plain_speeds, name="plain messages", mode="lines", line=_PLAIN)
