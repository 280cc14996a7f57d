"""Ranks that a program spawns by itself, below a launcher that has started one process."""

from __future__ import annotations

import pytest
from job_runs import Job, free_port

pytestmark = [pytest.mark.under_each, pytest.mark.fresh("multiprocessing starts Python anew, with what its parent has")]


@pytest.mark.parametrize("how", ["variables", "arguments"])
def test_ranks_by_spawn(job: Job, how: str) -> None:
    outcome = job.run(1, "spawned.py", how, free_port())
    if job.installation.vendor == "Open MPI":
        outcome.failed(r"multiprocessing \(mp.spawn\) started these 2 processes", "without rank.*mpirun -n 2 python")
    else:
        outcome.succeeded(1).says("rank 0: 2.0", "rank 1: 2.0")


def test_a_rank_that_starts_a_program(job: Job) -> None:
    """It is told what to leave out of its environment, and that works."""
    outcome = job.run(2, "spawned.py", "program").succeeded(2)
    assert outcome.stdout.count("a world of 1") == 2, outcome.output
