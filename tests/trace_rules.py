"""What Perfetto asks of a trace in Chrome's format: it drops slices that overlap, and arrows that end nowhere."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
STRAGGLER = Path(__file__).parents[1] / "docs/examples/straggler.py"
#: So late, in seconds, is a rank in four steps of `straggler`: far more than others' work makes the rest.
SECONDS_LATE = 0.2


def straggler(directory: Path) -> Path:
    """A copy of the page's example, in which a rank is that late."""
    copy = directory / STRAGGLER.name
    copy.write_text(STRAGGLER.read_text().replace("LATE_SECONDS = 12, 0.02", f"LATE_SECONDS = 12, {SECONDS_LATE}"))
    return copy


def slices_of(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """By process and thread, in the order in which Perfetto reads them: by time, else as in the file."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return {track: sorted(found, key=lambda event: _ns(event["ts"])) for track, found in tracks.items()}


def _ns(us: float) -> int:
    return round(us * 1000)


def check_slices(events: list[Event]) -> None:
    """Those of a track lie in each other or apart."""
    for track, found in slices_of(events).items():
        ends: list[int] = []
        for event in found:
            begin, end = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], (track, event)
            ends.append(end)


def check(path: Path) -> list[Event]:
    """The events of a trace that breaks no rule."""
    trace = json.loads(path.read_text())
    events = list(trace["traceEvents"])
    check_slices(events)
    tracks = {track: [(_ns(e["ts"]), _ns(e["ts"] + e["dur"])) for e in of] for track, of in slices_of(events).items()}
    flows = defaultdict(list)
    counters: dict[Any, float] = {}
    for event in events:
        assert event["ph"] in "XMsfC" and (event["ph"] == "M" or event["ts"] >= 0), event
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
            lies_in(tracks[event["pid"], event["tid"]], event)
        if event["ph"] == "C":
            assert event["ts"] > counters.get((event["pid"], event["name"]), -1), event
            counters[event["pid"], event["name"]] = event["ts"]
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"] and begin["cat"] == end["cat"] and begin["name"] == end["name"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(tracks)
    return events


def lies_in(track: list[tuple[int, int]], event: Event) -> None:
    """Some slice is open there then; the outermost ones are the longest, and few lie before it."""
    at = bisect.bisect_right(track, (_ns(event["ts"]), 1 << 62))
    assert any(end >= _ns(event["ts"]) for _, end in track[max(0, at - 6) : at]), event
