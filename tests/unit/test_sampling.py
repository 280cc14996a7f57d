"""Which share of the long tests runs: by the seed, the same on each rank, and at night all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_runs
import sampling

TESTS = Path(__file__).resolve().parents[1]
Seeds = Callable[[int], Iterator[int]]


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Seeds:
    """Of changes one after another: so many."""
    monkeypatch.setattr(sampling, "FULL", False)
    monkeypatch.setattr(sampling, "_said", {})

    def each(count: int) -> Iterator[int]:
        for seed in range(count):
            monkeypatch.setattr(sampling, "seed", lambda seed=seed: seed)
            yield seed

    return each


def sampled(expression: str, **variables: str) -> str:
    """What a process of its own says, as a rank does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MPIPLUS_TEST_")}
    environment |= {"PYTHONPATH": str(TESTS), **variables}
    program = [sys.executable, "-c", f"import sampling; print({expression})"]
    return subprocess.check_output(program, env=environment, text=True, timeout=60).strip()


SHARE = "sampling.share('x', list(range(100)))"


def test_the_seed_says_what_is_chosen() -> None:
    one, again, other = (sampled(SHARE, MPIPLUS_TEST_SEED=seed) for seed in ("1", "1", "2"))
    assert one == again != other
    assert len(json.loads(one)) == 10
    assert sorted(json.loads(one)) == json.loads(one)


def test_everything_is_chosen_sometime(seeds: Seeds) -> None:
    """A hundred seeds leave none of ten out, else a change would never meet it."""
    chosen, numbers = set(), set()
    for _ in seeds(100):
        chosen |= set(sampling.share("x", range(10)))
        numbers.add(sampling.number("x", 10))
    assert chosen == numbers == set(range(10))


def of_mpi(count: int) -> list[SimpleNamespace]:
    names = [f"tests/mpi/{sampling.THE_TABLE}::test_a", *(f"tests/mpi/test_x.py::test_{n}" for n in range(count))]
    return [
        SimpleNamespace(nodeid=name, path=Path(name.partition("::")[0]), get_closest_marker=lambda mark: None)
        for name in names
    ]


def parts(keyword: str = "") -> list[tuple[float, float] | None]:
    config = SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=["tests"])
    return [sampling.part_of_the_launch(config, ranks) for ranks in (2, 3, 5)]


def test_each_test_runs_on_some_number_of_ranks(seeds: Seeds, monkeypatch) -> None:
    """With each seed four of five, once, on 2, 3 or 5; and every launch has seeds that run it."""
    monkeypatch.delenv(sampling.LAUNCH, raising=False)
    items = of_mpi(200)
    table, all_of_them = items[0].nodeid, {item.nodeid for item in items[1:]}
    on = []
    for _ in seeds(30):
        ran = []
        for part in parts():
            left_out = sampling._of_the_launch(items, part)
            assert table not in left_out
            ran.append(all_of_them - left_out)
        assert 130 < sum(map(len, ran)) == len(set.union(*ran)) < 185
        assert 55 < len(ran[0]) < 105
        on.append(ran)
    assert all(set.union(*runs) == all_of_them for runs in zip(*on, strict=True))


def test_a_launch_imports_the_files_that_it_is_asked_for() -> None:
    def names(keyword: str) -> list[str]:
        return [Path(file).name for file in rank_runs.files_of(keyword)]

    assert names("test_operations or\n  test_calls") == ["test_operations.py", "test_calls_in_a_row.py"]
    for others in ("", "all_to_all", "not test_operations", "test_operations or all_to_all"):
        assert names(others) == ["mpi"]


def test_of_many_cases_each_has_its_turn(seeds: Seeds, monkeypatch) -> None:
    mark = SimpleNamespace(args=(3,))
    tests = {"tests/mpi/test_x.py::test_many": 7, "tests/mpi/test_x.py::test_one": 1}
    items = [
        SimpleNamespace(nodeid=f"{test}[{case}]", get_closest_marker={"cases": mark}.get)
        for test, count in tests.items()
        for case in range(count)
    ]
    ran = set()
    for _ in seeds(40):
        chosen = {item.nodeid for item in items} - sampling._of_many_cases(items)
        assert [sum(name.startswith(f"{test}[") for name in chosen) for test in tests] == [3, 1]
        ran |= chosen
    assert ran == {item.nodeid for item in items}
    monkeypatch.setattr(sampling, "FULL", True)
    assert not sampling._of_many_cases(items)


def test_each_test_of_jobs_runs_under_either_mpi_sometime(seeds: Seeds) -> None:
    """And under one of them in a change, or under both if it is marked so; all under any other."""
    mpis = [SimpleNamespace(vendor=vendor, name=f"{vendor}-5") for vendor in ("MPICH", "Open MPI", "Intel MPI")]

    def items(mpi, marks=()):
        return [
            SimpleNamespace(
                nodeid=f"tests/jobs/test_x.py::test_{n}[{mpi.name}]",
                callspec=SimpleNamespace(params={"installation": mpi}),
                get_closest_marker=lambda mark: mark if mark in marks else None,
            )
            for n in range(60)
        ]

    each = {item.nodeid.partition("[")[0] for item in items(mpis[0])}
    under: list[set[str]] = [set(), set()]
    for _ in seeds(100):
        left_out = [{name.partition("[")[0] for name in sampling._of_the_session(items(mpi))} for mpi in mpis]
        mpich, open_mpi, others = (each - names for names in left_out)
        assert not mpich & open_mpi and len(mpich) < len(open_mpi) and others == each
        under_each = [
            {name.partition("[")[0] for name in sampling._of_the_session(items(mpi, ("under_each",)))} for mpi in mpis
        ]
        assert under_each[0] == under_each[1] == each - open_mpi and not under_each[2]
        assert len(sampling._of_the_session(items(mpis[1], marks=("slow",)))) == 54  # a tenth is not divided again
        under = [under[0] | mpich, under[1] | open_mpi]
    assert under == [each, each]
