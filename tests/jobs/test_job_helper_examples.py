"""The documentation's scripts for those who come from Composer, Axolotl and ml."""

from __future__ import annotations

import re
from pathlib import Path

import fork_server
import pytest
import torch
from job_runs import Job, Outcome

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def trained(outcome: Outcome, directory: Path, origin: str, ranks: int) -> None:
    """Exit code 0, a sensible accuracy said once, and one checkpoint."""
    outcome.ended().says_not("Traceback", "Warning")
    said = re.findall(r"(\d+) ranks: loss ([\d.]+), test accuracy ([\d.]+), saved in", outcome.stdout)
    assert len(said) == 1, outcome.output
    assert int(said[0][0]) == ranks
    assert float(said[0][2]) >= 0.9
    assert sorted(path.name for path in directory.iterdir()) == sorted(["digits.pt", f"{origin}.pt"])
    assert all(torch.isfinite(value).all() for value in torch.load(directory / f"{origin}.pt").values())


@pytest.mark.parametrize(
    ("origin", "launched", "ranks"),
    [
        *(pytest.param(origin, True, 4, marks=pytest.mark.slow) for origin in ("composer", "axolotl", "ml")),
        *(("composer", False, 1), ("axolotl", False, 1)),  # single processes then; ml's starts its ranks
        pytest.param("ml", False, 4, marks=pytest.mark.slow),
    ],
)
def test_example(job: Job, origin: str, launched: bool, ranks: int) -> None:
    output = job.directory / "output"
    output.mkdir()
    words = [str(EXAMPLES / f"helpers_{origin}.py"), "--output", str(output)]
    if origin == "ml" and not launched:
        words += ["--ranks", str(ranks)]
    command = job.installation.command(ranks, words) if launched else [fork_server.python(), *words]
    trained(job.start(command, None), output, origin, ranks)
