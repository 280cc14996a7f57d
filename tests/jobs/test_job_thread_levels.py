"""Less than MPI_THREAD_MULTIPLE, which the program chose."""

from __future__ import annotations

import pytest
from job_runs import Job


@pytest.mark.fresh("Python starts MPI as the first thing in its life")
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_calls_of_mpi(job: Job, level: str) -> None:
    outcome = job.run(2, "thread_levels.py", level)
    if "provides more than it is asked for" in outcome.output:
        pytest.skip("this MPI provides MPI_THREAD_MULTIPLE all the same")
    outcome.succeeded(2)
