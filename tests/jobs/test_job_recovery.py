"""The death of a rank, survived where MPI can."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from job_runs import Job, run_process

EXAMPLE = Path(__file__).parents[2] / "docs/examples/survive.py"


def with_ulfm(job: Job, ranks: int, *arguments: str, **environment: str):
    command = job.installation.command(ranks, [str(EXAMPLE), *arguments])
    command[1:1] = ["--with-ft", "ulfm"]
    return run_process(command, {**job.installation.full_environment(), **environment}, job.directory)


@pytest.mark.parametrize("shared_memory", ["1", "0"])
@pytest.mark.parametrize("victim", [0, 2])
def test_training_goes_on(job: Job, victim: int, shared_memory: str) -> None:
    """Rank 0 hosts the store; the new world has one of its own."""
    if job.installation.vendor != "Open MPI":
        pytest.skip(f"{job.installation.vendor} has no ULFM")
    outcome = with_ulfm(job, 3, "--kill", str(victim), MPIPLUS_SHM=shared_memory)
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == []
    outcome.says(rf"rank {victim}\b.*(has ended|has died)", "rank 0 of 2: accuracy 0.9", "rank 1 of 2: accuracy 0.9")


def test_an_mpi_without_it_says_so(job: Job) -> None:
    if job.installation.vendor == "Open MPI":
        pytest.skip("Open MPI has ULFM")
    code = "import torch.distributed as d, torchmpi_plugin; d.init_process_group('mpiplus'); torchmpi_plugin.shrink()"
    command = [sys.executable, "-c", code]
    outcome = run_process(command, {**os.environ, **job.installation.full_environment()}, job.directory)
    outcome.failed("NotImplementedError", "--with-ft ulfm")
