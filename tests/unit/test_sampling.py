"""What a change leaves out of the tests, another one runs; and no failure of a rank looks like a pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import sampling
from mpi_installations import run_limited
from rank_reports import RankReporter, summarise

EACH = {str(number) for number in range(100)}


def test_patience_with_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patience.FACTOR", 0.001)
    assert run_limited(["sleep", "60"], {}, 100)[0] is None


def items(folder: str, mpi: SimpleNamespace | None = None) -> list:
    return [
        SimpleNamespace(
            nodeid=f"tests/{folder}/test_x.py::test_{number}" + (f"[{mpi.name}]" if mpi else ""),
            path=Path("test_x.py"),
            callspec=SimpleNamespace(params={"installation": mpi}),
            get_closest_marker=lambda mark: None,
        )
        for number in EACH
    ]


def test_everything_is_run_sometime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FULL", False)
    monkeypatch.delenv(sampling.LAUNCH, raising=False)
    config = SimpleNamespace(option=SimpleNamespace(keyword=""), args=["tests"])
    mpis = [SimpleNamespace(vendor=vendor, name=f"{vendor}-5") for vendor in ("MPICH", "Open MPI")]
    ran: list[set[str]] = [set() for _ in range(6)]
    for seed in range(100):
        monkeypatch.setattr(sampling, "seed", lambda seed=seed: seed)
        left_out = [sampling._of_the_launch(items("mpi"), sampling.part_of_the_launch(config, n)) for n in (2, 3, 5)]
        assert 200 < sum(map(len, left_out)) < 240  # each runs on one number of ranks, or in another change
        left_out += [sampling._of_the_session(items("jobs", mpi)) for mpi in mpis]
        for number, names in enumerate(left_out):
            ran[number] |= EACH - {name.partition("[")[0].rpartition("_")[2] for name in names}
        ran[5] |= {*sampling.share("x", sorted(EACH))}
    assert set(map(len, ran)) == {100}


def test_a_failure_of_one_rank(tmp_path: Path) -> None:
    def rank(number: int, *tests: tuple[str, str], status: int | None = 0) -> None:
        reporter = RankReporter(tmp_path, number)
        for name, outcome in tests:
            reporter.pytest_runtest_logstart(name)
            told = SimpleNamespace(nodeid=name, when="call", outcome=outcome, duration=0.1, longreprtext="1 == 2")
            reporter.pytest_runtest_logreport(told)
        if status is not None:
            reporter.pytest_sessionfinish(status)

    rank(0, ("a", "passed"), ("b", "passed"))
    rank(1, ("a", "passed"), ("b", "failed"))
    rank(2, ("a", "passed"), status=None)
    told = "\n".join(summarise(tmp_path, 4))
    for words in ("rank 3 reported nothing", "rank 2 ended while running", "FAILED b on ranks [1]\n1 == 2"):
        assert words in told
    assert "different numbers" in told and "no test passed" not in told
