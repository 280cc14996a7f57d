"""What each rank of an MPI test run writes about its tests, and how the driver sums it up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_TRACEBACK = 6000


class RankReporter:
    """A pytest plugin that writes one line of JSON per event, so that a crash keeps the past."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = report_path(directory, rank)

    def _write(self, **event: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def note(self, text: str) -> None:
        """Leave a sentence about this rank for the driver's message."""
        self._write(event="note", text=text)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="start", test=nodeid)

    def _result(self, test: str, outcome: str, text: str) -> None:
        self._write(event="result", test=test, outcome=outcome, text=text[-LONGEST_TRACEBACK:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._result(report.nodeid, report.outcome, report.longreprtext)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._result(report.nodeid or "collection", "failed", report.longreprtext)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(event="finish")


@dataclass
class RankReport:
    """One rank's report, read back."""

    rank: int
    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    running: str | None = "no test (before or between)"


def report_path(directory: Path, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}.jsonl"


def read_report(directory: Path, rank: int) -> RankReport | None:
    """One rank's report, or None where the rank wrote nothing."""
    path = report_path(directory, rank)
    if not path.exists():
        return None
    report = RankReport(rank)
    for line in path.read_text().splitlines():
        match json.loads(line):
            case {"event": "start", "test": test}:
                report.running = test
            case {"event": "note", "text": text}:
                report.notes.append(text)
            case {"event": "finish"}:
                report.running = None
            case {"outcome": "passed"}:
                report.passed += 1
            case {"outcome": "failed", "test": test, "text": text}:
                report.failures[test] = text
    return report


def summarise(directory: Path, ranks: int) -> list[str]:
    """Every reason why this run is not a pass, as paragraphs; empty where it is one."""
    reports = {rank: read_report(directory, rank) for rank in range(ranks)}
    problems = [f"rank {rank} reported nothing" for rank, report in reports.items() if report is None]
    present = [report for report in reports.values() if report is not None]
    problems += [f"rank {report.rank} {note}" for report in present for note in report.notes]
    problems += [f"rank {report.rank} ended while running {report.running}" for report in present if report.running]
    problems += _failures(present)
    passed = {report.rank: report.passed for report in present}
    if len(set(passed.values())) > 1:
        problems.append(f"ranks passed different numbers of tests: {passed}")
    if passed and min(passed.values()) == 0:
        problems.append("no test passed")
    return problems


def _failures(reports: list[RankReport]) -> list[str]:
    by_test: dict[str, dict[str, list[int]]] = {}
    for report in reports:
        for test, text in report.failures.items():
            by_test.setdefault(test, {}).setdefault(text, []).append(report.rank)
    return [_failure(test, texts) for test, texts in by_test.items()]


def _failure(test: str, texts: dict[str, list[int]]) -> str:
    """One failed test: the first rank's text as it is, of others' different texts the last line."""
    (first, ranks), *others = texts.items()
    lines = [f"FAILED {test} on ranks {ranks}", first]
    for text, differing in others:
        lines.append(f"and on ranks {differing}: {text.rstrip().splitlines()[-1]}")
    return "\n".join(lines)
