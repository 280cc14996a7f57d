"""How the driver sums up what the ranks report: nothing that is wrong may look like a pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rank_reports import RankReporter, summarise


class Rank(RankReporter):
    """One rank's reporter, with shorthands for what pytest tells it."""

    def test(self, name: str, outcome: str = "passed", text: str = "", when: str = "call") -> Rank:
        self.pytest_runtest_logstart(name)
        report = SimpleNamespace(nodeid=name, when=when, outcome=outcome, duration=0.1, longreprtext=text)
        self.pytest_runtest_logreport(report)
        return self

    def end(self, status: int = 0) -> None:
        self.pytest_sessionfinish(status)


@pytest.fixture
def rank(tmp_path: Path):
    return lambda number: Rank(tmp_path, number)


def test_a_rank_that_wrote_nothing(rank, tmp_path: Path) -> None:
    rank(0).test("a").end()
    assert summarise(tmp_path, 2) == ["rank 1 reported nothing"]


def test_a_rank_that_died_in_a_test(rank, tmp_path: Path) -> None:
    rank(0).test("a").test("b").end()
    rank(1).test("a").pytest_runtest_logstart("b")
    problems = summarise(tmp_path, 2)
    assert "rank 1 ended while running b" in problems
    assert any("different numbers" in problem for problem in problems)


def test_a_test_that_failed_on_one_rank(rank, tmp_path: Path) -> None:
    rank(0).test("a").end()
    rank(1).test("a", "failed", "assert 1 == 2").end(1)
    problems = summarise(tmp_path, 2)
    assert "FAILED a on ranks [1]\nassert 1 == 2" in problems


def test_one_text_for_all_ranks_that_say_the_same(rank, tmp_path: Path) -> None:
    for number, text in enumerate(("wrong", "wrong", "lines\nother")):
        rank(number).test("b").test("a", "failed", text).end(1)
    assert summarise(tmp_path, 3) == ["FAILED a on ranks [0, 1]\nwrong\nand on ranks [2]: other"]


def test_no_test_at_all(rank, tmp_path: Path) -> None:
    for number in range(2):
        rank(number).end(5)
    assert summarise(tmp_path, 2) == ["no test passed"]


def test_a_file_that_cannot_be_imported(rank, tmp_path: Path) -> None:
    broken = rank(0)
    broken.pytest_collectreport(SimpleNamespace(nodeid="f.py", failed=True, longreprtext="ImportError"))
    broken.end(2)
    assert "FAILED f.py on ranks [0]\nImportError" in summarise(tmp_path, 1)
