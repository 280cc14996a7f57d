"""Tracks of their own, in a trace of torch's profiler, for operations that go on while their thread does other things.

The profiler has an event on the thread that has begun it, and viewers drop events of a thread that overlap partly.
There is no way to say another thread, so the file is changed where torch has just written it.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import attempt

_OURS = "mpiplus:"
#: Of a track: no number of a thread.
_FIRST_TRACK = 2_000_000_000
#: A longer trace stays as it is: Python takes ten times its bytes to change it.
_MOST_BYTES = 256 << 20

Event = dict[str, Any]


def writing(write: Callable[..., Any]) -> Callable[..., Any]:
    """The profiler's method that writes a file, with such tracks."""

    @functools.wraps(write)
    def export_chrome_trace(self: Any, path: Any, *more: Any, **named: Any) -> Any:
        result = write(self, path, *more, **named)
        attempt("the profiler's trace stays as it is", lambda: _rewrite(Path(path)), None)
        return result

    return export_chrome_trace


def _rewrite(path: Path) -> None:
    text = path.read_text("utf-8") if path.stat().st_size <= _MOST_BYTES else ""
    if f'"{_OURS}' in text:
        trace = json.loads(text)
        if move(trace["traceEvents"]):
            path.write_text(json.dumps(trace), "utf-8")


def move(events: list[Event]) -> int:
    """Put our events that overlap others partly on tracks of their own, with what is said of the call; how many."""
    threads = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            threads[event["pid"], event["tid"]].append(event)
    moved = [event for thread in threads.values() for event in _overlapping(thread)]
    ends: list[float] = []
    for event in sorted(moved, key=lambda event: float(event["ts"])):
        lane = next((lane for lane, end in enumerate(ends) if end <= event["ts"]), len(ends))
        if lane == len(ends):
            ends.append(0)
            track = {"ph": "M", "pid": event["pid"], "tid": _FIRST_TRACK + lane}
            events.append({**track, "name": "thread_name", "args": {"name": f"mpiplus, asynchronous {lane + 1}"}})
            events.append({**track, "name": "thread_sort_index", "args": {"sort_index": _FIRST_TRACK + lane}})
        ends[lane] = _end(event)
        event["tid"] = _FIRST_TRACK + lane
    return len(moved)


def _end(event: Event) -> float:
    return float(event["ts"] + event.get("dur", 0))


def _overlapping(thread: list[Event]) -> list[Event]:
    """Those of ours on a thread that neither lie in others, or others in them, nor apart."""
    thread.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    begins, found = [event["ts"] for event in thread], []
    open_ends: list[float] = []
    for at, event in enumerate(thread):
        begin, end = event["ts"], _end(event)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if event["name"].startswith(_OURS):
            inside = thread[at + 1 : bisect.bisect_left(begins, end)]
            call = next((other for other in inside if other["name"].startswith("c10d::")), None)
            if call is not None:
                event["args"] = {**call.get("args", {}), **event.get("args", {})}
            if any(end > other for other in open_ends) or any(_end(other) > end for other in inside):
                found.append(event)
                continue
        open_ends.append(end)
    return found
