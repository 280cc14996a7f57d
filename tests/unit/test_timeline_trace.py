"""Timelines of jobs that nobody ran: what is drawn of their ranks' files, and how fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from made_up_calls import STEP_NS, about, all_reduces, leave
from trace_rules import check

from torchmpi_plugin.cli import main
from torchmpi_plugin.timeline import operations, rows, trace

ALL_REDUCE = [{"name": "all_reduce", "op": "SUM"}]


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """Names, times, arrows and counters; the ring has dropped nothing."""
    for rank in range(3):
        leave(tmp_path, about(rank, 3), all_reduces(rank, 3, 30), ALL_REDUCE)
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(tmp_path / "t.json")])
    assert (done.exit_code, "90 operations of 3 of 3 ranks" in done.output) == (0, True), done.output
    events = check(tmp_path / "t.json")
    waits = [event for event in events if event["name"].startswith("waits for")]
    assert len(waits) == 60
    assert {event["name"] for event in waits if event["tid"] == 1} == {"waits for rank 1", "waits for rank 2"}
    assert sum(event["dur"] for event in waits if event["name"] == "waits for rank 1") == pytest.approx(
        10 * (500 + 499.8)
    )
    assert sum(event["name"] == "complete, not yet asked for" for event in events) == 45
    (first,) = [event for event in events if event["name"] == "all_reduce" and event["tid"] == 1][:1]
    assert first["args"] == {
        **{"number": 1, "bytes": 4096, "dtype": "float32", "op": "SUM", "group": "default_pg"},
        "at": "/train.py:7",
    }
    assert sum(event["ph"] == "s" and event["name"] == "last to come" for event in events) == 60
    moved = [e["args"]["bytes/s"] for e in events if e["ph"] == "C" and e["name"] == "bytes/s of rank 2"]
    assert sum(moved) * 1e-3 == 30 * 4096


def test_overlapping_operations_and_one_that_hangs(tmp_path: Path) -> None:
    """Two under way at a time need a second track; what is not complete lasts to the end, and says so."""
    ring = np.zeros(8, rows.ROW)
    ring["number"] = ring["sequence"] = range(8)
    ring["begun"], ring["kind"], ring["peer"], ring["last"] = 1000 * ring["number"], ring["number"] > 0, -1, -1
    ring["complete"] = ring["begun"] + 1500
    ring["complete"][7], ring["last_came"][6] = 0, 6500
    ring["last"][6] = 1
    leave(tmp_path, about(0, 2), ring, [{"name": "broadcast"}])
    trace.write(operations.in_directory(tmp_path), tmp_path / "t.json")
    events = check(tmp_path / "t.json")
    assert [e["ts"] for e in events if e["name"] == "broadcast (not complete)"] == [6.0]
    assert {e["tid"] for e in events if e["name"].startswith("broadcast")} == {1, 2}
    assert [(e["ts"], e["dur"]) for e in events if e["name"] == "waits for rank 1"] == [(5.0, 0.5)]


def messages(rank: int, *calls: tuple[str, int, int, int, float]) -> np.ndarray:
    """A call a microsecond of name, tag, bytes, peer and number of us to its end, 0: it has none."""
    ring = np.zeros(16, rows.ROW)
    for at, (name, tag, size, peer, us) in enumerate(calls, 1):
        begun = 1000 * at + 500 * rank
        complete = int(us * 1000) + begun if us else 0
        ring[at] = (at, begun, 0, complete, 0, at, size, ("send", "recv").index(name) + 1, -1, peer, tag)
    return ring


def sent(directory: Path) -> list[tuple[float, float]]:
    """When the messages of a job begin and arrive, in us."""
    trace.write(operations.in_directory(directory), directory / "t.json")
    found = [event for event in check(directory / "t.json") if event["name"] == "message"]
    return list(zip(*([e["ts"] for e in found if e["ph"] == end] for end in "sf"), strict=True))


def test_messages(tmp_path: Path) -> None:
    """A receive waits until the message is sent, and an arrow goes from there, to the receive with the tag."""
    kinds = [{"name": "send"}, {"name": "recv"}]
    sends = [("send", 1, 8, 1, 1.0), ("send", 2, 80, 1, 1.0), ("send", 1, 16, 1, 1.0), ("send", 3, 24, 1, 1.0)]
    leave(tmp_path, about(0, 2), messages(0, *sends), kinds)
    receives = [("recv", 2, 80, 0, 9.0), ("recv", 1, 8, 0, 1.0), ("recv", 3, 24, 0, 9.0), ("recv", 1, 16, 0, 1.0)]
    leave(tmp_path, about(1, 2), messages(1, *receives), kinds)
    assert sent(tmp_path) == [(0.0, 1.5), (2.0, 3.5), (1.0, 1.0), (3.0, 3.0)]
    waits = [e for e in check(tmp_path / "t.json") if e["name"] == "waits for rank 0"]
    assert [(e["ts"], e["dur"]) for e in waits] == [(0.5, 0.5), (2.5, 0.5)]


def test_messages_that_may_have_gone_elsewhere(tmp_path: Path) -> None:
    """A receive from anybody that is not complete may have the first; where the lengths differ no pair is right."""
    kinds = [{"name": "send"}, {"name": "recv"}]
    leave(tmp_path, about(0, 2), messages(0, *[("send", tag, 8, 1, 1.0) for tag in (1, 1, 2, 2)]), kinds)
    receives = [("recv", 1, 8, -1, 0.0), ("recv", 1, 8, 0, 9.0), ("recv", 2, 16, 0, 9.0), ("recv", 2, 8, 0, 9.0)]
    leave(tmp_path, about(1, 2), messages(1, *receives), kinds)
    assert sent(tmp_path) == []


def test_clocks_of_nodes(tmp_path: Path) -> None:
    """A node's clock is an hour ahead and gains 1 ms in the 30 ms between the measurements."""
    ahead = 3600 * 10**9
    clock = [
        {"clock": 1, "at": 0, "offset": ahead, "error": 7000},
        {"clock": 1, "at": 30 * STEP_NS, "offset": ahead + STEP_NS, "error": 9000},
    ]
    for rank in range(2):
        ring = all_reduces(rank, 2, 30)
        for name in ("begun", "complete", "asked"):
            ring[name][1:31] += (ahead + ring[name][1:31] // 30) * (rank == 1)
        leave(tmp_path, about(rank, 2, 1), ring, ALL_REDUCE, *(clock if rank == 0 else []))
    job = operations.in_directory(tmp_path)
    assert job.errors == {0: 0, 1: 9000}
    assert len(job.begun) == 60
    assert np.abs(job.begun[30:] - job.begun[:30] - np.where(np.arange(1, 31) % 2, 500_000, -499_900)).max() < 1000
    assert set(job.last.tolist()) == {0, 1}


def test_a_ring_that_is_full(tmp_path: Path) -> None:
    """It has the last calls, and what is not there any more is said."""
    ring = np.zeros(rows.PLACES, rows.ROW)
    ring["number"] = np.where(np.arange(rows.PLACES) < 100, rows.PLACES, 0) + np.arange(rows.PLACES)
    ring["begun"] = ring["sequence"] = ring["number"]
    ring["complete"], ring["kind"] = ring["begun"] + 1, 1
    leave(tmp_path, about(0, 1), ring, ALL_REDUCE)
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(tmp_path / "t.json")])
    assert "99 calls before them are not recorded any more" in done.output, done.output


def test_nothing_recorded(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(tmp_path / "t.json")])
    assert done.exit_code == 1 and "has no calls of ranks" in done.output
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(tmp_path / "t.txt")])
    assert done.exit_code == 2 and "must end with .json" in done.output


@pytest.mark.parametrize("text", ["5\n[]", '{"rank": 0, "first": "x"}', "\udcff" * 99_999])
def test_files_that_are_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "1-job.0.json").write_text(text, errors="surrogateescape")
    np.ones(1, rows.ROW).tofile(tmp_path / "1-job.0.calls")
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(tmp_path / "t.json")])
    assert done.exit_code == 1 and "Error: the files of job 1-job" in done.output, done.exception
    assert len(done.output) < 1000, "the whole file"


def test_a_page(tmp_path: Path) -> None:
    """One file with everything in it; tests/docs/test_timeline_page.py looks at it in a browser."""
    for rank in range(2):
        leave(tmp_path, about(rank, 2), all_reduces(rank, 2, 20), ALL_REDUCE)
    file = tmp_path / "t.html"
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(file)])
    assert done.exit_code == 0, done.output
    text = file.read_text()
    assert "Waited for a rank" in text and "hundredths" in text and "<script src=" not in text
