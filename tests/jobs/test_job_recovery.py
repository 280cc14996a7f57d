"""The death of a rank, survived where MPI can."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import SCRIPTS, Job, Outcome

from torchmpi_plugin import torch_internals

#: Open MPI has what is tested here, others say that they have not.
pytestmark = pytest.mark.under_each
EXAMPLE = Path(__file__).parents[2] / "docs/examples/survive.py"


def with_ulfm(job: Job, ranks: int, script: Path, *arguments: str, **environment: str) -> Outcome:
    return job.surviving(ranks, script, *arguments, environment=environment).ended()


@pytest.mark.parametrize(("victim", "collectives"), [(0, "auto"), (2, "mpi-only")])
def test_training_goes_on(job: Job, victim: int, collectives: str) -> None:
    """Rank 0 hosts the store; the new world has one of its own."""
    outcome = with_ulfm(job, 3, EXAMPLE, "--kill", str(victim), MPIPLUS_COLLECTIVES=collectives)
    outcome.says(rf"rank {victim}\b.*(has ended|has died)", "rank 0 of 2: accuracy 0.9", "rank 1 of 2: accuracy 0.9")


def test_a_second_death(job: Job) -> None:
    outcome = with_ulfm(job, 4, EXAMPLE, "--kill", "2", "--kill", "0")
    outcome.says(r"rank 2\b.*has ended", r"rank 0\b.*has ended", "rank 0 of 2: accuracy 0.9", "rank 1 of 2: accuracy")


@pytest.mark.parametrize("collectives", ["auto", "mpi-only"])
def test_a_subgroup_goes_on(job: Job, collectives: str) -> None:
    outcome = with_ulfm(job, 4, SCRIPTS / "recovery.py", "subgroup", MPIPLUS_COLLECTIVES=collectives)
    outcome.says(*(rf"\[{rank}\] end" for rank in (0, 1, 3)))


@pytest.mark.every_change
def test_a_subgroup_needs_the_store(job: Job) -> None:
    outcome = with_ulfm(job, 3, SCRIPTS / "recovery.py", "store_is_gone")
    outcome.says(*(rf"\[{rank}\] end" for rank in (1, 2)))


def test_an_mpi_without_it_says_so(job: Job) -> None:
    if job.installation.has_ulfm:
        pytest.skip(f"{job.installation.name} has ULFM")
    code = "import torch.distributed as d, torchmpi_plugin; d.init_process_group('mpiplus'); torchmpi_plugin.shrink()"
    outcome = job.start(job.installation.command(1, ["-c", code]), {})
    outcome.failed("NotImplementedError", "--with-ft ulfm")


@pytest.mark.skipif(not torch_internals.has_python_backends(), reason="needs torch 2.15")
@pytest.mark.parametrize("end", ["alive", "dead"])
@pytest.mark.parametrize("which", ["world", "subgroup"])
def test_torchs_shrink_group(job: Job, which: str, end: str) -> None:
    outcome = with_ulfm(job, 4, SCRIPTS / "recovery.py", "shrunk", which, end)
    for rank in (0, 1, 3):
        outcome.says(rf"\[{rank}\] end")
    outcome.says_not("AssertionError", "Segmentation")
