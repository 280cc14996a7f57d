"""The documentation's scripts for those who come from Composer, Axolotl and ml."""

from __future__ import annotations

import re
from pathlib import Path

import fork_server
import pytest
import torch
from job_runs import Job, Outcome, run_process

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def trained(outcome: Outcome, directory: Path, origin: str, ranks: int) -> None:
    """Exit code 0, a sensible accuracy said once, and one checkpoint."""
    assert not outcome.survivors
    if outcome.code != 0:
        outcome.problem("the example failed")
    outcome.says_not("Traceback", "Warning")
    said = re.findall(r"(\d+) ranks: loss ([\d.]+), test accuracy ([\d.]+), saved in", outcome.stdout)
    assert len(said) == 1, outcome.output
    assert int(said[0][0]) == ranks
    assert float(said[0][2]) >= 0.9
    assert sorted(path.name for path in directory.iterdir()) == sorted(["digits.pt", f"{origin}.pt"])
    assert all(torch.isfinite(value).all() for value in torch.load(directory / f"{origin}.pt").values())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    directory = tmp_path / "output"
    directory.mkdir()
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["composer", "axolotl", "ml"])
def test_under_mpirun(job: Job, origin: str, output: Path) -> None:
    arguments = [str(EXAMPLES / f"helpers_{origin}.py"), "--output", str(output)]
    command = job.installation.command(4, arguments)
    trained(run_process(command, job.installation.full_environment(), job.directory), output, origin, 4)


@pytest.mark.parametrize(
    ("origin", "ranks"), [("composer", 1), ("axolotl", 1), ("ml", 1), pytest.param("ml", 4, marks=pytest.mark.slow)]
)
def test_from_a_plain_process(job: Job, origin: str, ranks: int, output: Path) -> None:
    """Those of Composer and Axolotl are single processes then; ml's starts its ranks."""
    command = [fork_server.python(), str(EXAMPLES / f"helpers_{origin}.py"), "--output", str(output)]
    command += ["--ranks", str(ranks)] if origin == "ml" else []
    trained(run_process(command, job.installation.full_environment(), job.directory), output, origin, ranks)
