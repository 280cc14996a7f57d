"""A job in Chrome's trace format, which Perfetto and chrome://tracing open.

A node is a process; a rank in a group is a thread, or several, where it had operations under way that overlap. An
operation is a slice, and what it consists of are slices in it. Written as text, a line for each event: a job has
millions, and ``json`` would take minutes for them. Imports neither torch nor MPI.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .operations import Job

#: So many values has a counter.
_BUCKETS = 500


def write(job: Job, path: Path) -> None:
    """Write it, compressed where the name ends with .gz, as Perfetto reads it too."""
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
        about = {
            "nodes": {each["node"]: each["host"] for each in job.ranks},
            "clock error of nodes (us)": {
                node: "not compared" if error is None else error / 1000 for node, error in job.errors.items()
            },
            "calls not recorded any more, by rank": job.dropped,
        }
        file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n')
        file.writelines(f"{event},\n" for event in _events(job, _Threads(job)))
        file.write('{"ph":"M","name":"process_sort_index","pid":1,"tid":0,"args":{"sort_index":0}}\n]}\n')


class _Threads:
    """Of each operation the process and thread."""

    def __init__(self, job: Job) -> None:
        self.of: list[str] = [""] * len(job.begun)
        self.names: dict[tuple[int, int], str] = {}
        nodes = {each["rank"]: each["node"] for each in job.ranks}
        groups = job.of_kinds("number")
        order = np.lexsort((-_end(job), job.begun, groups, job.rank))
        lanes: list[int] = []
        track, base = (-1, -1), 0
        ranks, numbers, begun, end = (column.tolist() for column in (job.rank, groups, job.begun, _end(job)))
        for at in order.tolist():
            if track != (ranks[at], numbers[at]):
                track, lanes, base = (ranks[at], numbers[at]), [], len(self.names) + 1
            lane = next((lane for lane, free in enumerate(lanes) if free <= begun[at]), len(lanes))
            if lane == len(lanes):
                lanes.append(0)
                more = f" ({lane + 1})" if lane else ""
                group = job.kinds[job.kind[at]]["group"]
                self.names[nodes[ranks[at]] + 1, base + lane] = f"rank {ranks[at]}, {group}{more}"
            lanes[lane] = end[at]
            self.of[at] = f'"pid":{nodes[ranks[at]] + 1},"tid":{base + lane}'
        self.order = order


def _end(job: Job) -> Any:
    return np.maximum(job.complete, job.asked)


def _us(times: Any) -> list[str]:
    """As the format has it: of ns, which a float of so many microseconds still tells apart."""
    return [f"{time:.3f}" for time in (times / 1000).tolist()]


def _events(job: Job, threads: _Threads) -> Iterator[str]:
    for each in {each["node"]: each for each in job.ranks}.values():
        name = json.dumps(f"node {each['node']} ({each['host']})")
        yield f'{{"ph":"M","name":"process_name","pid":{each["node"] + 1},"tid":0,"args":{{"name":{name}}}}}'
    for (process, thread), name in threads.names.items():
        at = f'"pid":{process},"tid":{thread}'
        yield f'{{"ph":"M","name":"thread_name",{at},"args":{{"name":{json.dumps(name)}}}}}'
        yield f'{{"ph":"M","name":"thread_sort_index",{at},"args":{{"sort_index":{thread}}}}}'
    yield from _slices(job, threads)
    yield from _arrows(job, threads)
    yield from _counters(job)


def _slices(job: Job, threads: _Threads) -> Iterator[str]:
    heads, order = [_head(kind) for kind in job.kinds], threads.order
    begun, came, complete, end = (each[order] for each in (job.begun, job.came, job.complete, _end(job)))
    texts = [_us(each) for each in (begun - job.start, came - job.start, complete - job.start)]
    spans = [_us(each) for each in (end - begun, came - begun, complete - came, end - complete)]
    has = [each.tolist() for each in (came > begun, (came > begun) & (complete > came), end > complete)]
    more = [each[order].tolist() for each in (job.kind, job.sequence, job.bytes, job.last, job.is_open)]
    rows = zip([threads.of[at] for at in order.tolist()], *texts, *spans, *has, *more, strict=True)
    for of, ts, came_at, complete_at, dur, waits, moves, rests, has_waited, has_moved, has_rested, *rest in rows:
        kind, sequence, size, last, is_open = rest
        name, said = heads[kind]
        unless = " (not complete)" if is_open else ""
        head = f'{{"ph":"X",{of},"ts":'
        yield f'{head}{ts},"dur":{dur},"name":"{name}{unless}","args":{{"number":{sequence},"bytes":{size},{said}}}}}'
        if has_waited:
            yield f'{head}{ts},"dur":{waits},"name":"waits for {f"rank {last}" if last >= 0 else "others"}"}}'
        if has_moved:
            yield f'{head}{came_at},"dur":{moves},"name":"moves"}}'
        if has_rested:
            yield f'{head}{complete_at},"dur":{rests},"name":"complete, not yet asked for"}}'


def _head(kind: dict[str, Any]) -> tuple[str, str]:
    """An operation's name, and what is said of all of its kind."""
    said = {name: kind[name] for name in ("dtype", "op", "group") if kind[name]}
    if kind["file"]:
        said["at"] = f"{kind['file']}:{kind['line']}"
    return json.dumps(kind["name"])[1:-1], json.dumps(said, separators=(",", ":"))[1:-1]


def _arrows(job: Job, threads: _Threads) -> Iterator[str]:
    """From where one has come, or sends, to where the other goes on."""
    if not job.arrows:
        return
    sources, targets = np.array(job.arrows).T
    at = np.clip(job.came[targets], job.begun[sources], _end(job)[targets])
    times = _us(job.begun[sources] - job.start), _us(at - job.start)
    sends = (np.array([kind["name"] == "send" for kind in job.kinds])[job.kind[sources]]).tolist()
    rows = zip(sources.tolist(), targets.tolist(), *times, sends, strict=True)
    for number, (source, target, begun, goes_on, is_message) in enumerate(rows, 1):
        head = f'"cat":"mpiplus","name":"{"message" if is_message else "last to come"}","id":{number}}}'
        yield f'{{"ph":"s",{threads.of[source]},"ts":{begun},{head}'
        yield f'{{"ph":"f","bp":"e",{threads.of[target]},"ts":{goes_on},{head}'


def _counters(job: Job) -> Iterator[str]:
    """Bytes that each rank's operations had moved, by when they were complete."""
    span = int(job.complete.max(initial=0)) - job.start
    width = max(1_000_000, span // _BUCKETS)
    for each in job.ranks:
        mine = (job.rank == each["rank"]) & ~job.is_open
        moved = np.bincount((job.complete[mine] - job.start) // width, job.bytes[mine], span // width + 2)
        name = f'"ph":"C","pid":{each["node"] + 1},"tid":0,"name":"bytes/s of rank {each["rank"]}"'
        for bucket, total in zip(_us(width * np.arange(len(moved))), (moved * 1e9 / width).tolist(), strict=True):
            yield f'{{{name},"ts":{bucket},"args":{{"bytes/s":{total:.0f}}}}}'
