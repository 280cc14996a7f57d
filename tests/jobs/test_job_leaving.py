"""After every failure that a job survives its ranks may end apart: all come to their end, and the code is 0."""

from __future__ import annotations

import pytest
import sampling
from job_runs import SCRIPTS, Job

pytestmark = pytest.mark.under_each
#: Which ranks end first: the seed says it for each way.
FIRST = ["0", "last"]
WAYS = ["new_group late", "new_group never", "no_world before", "aborted send", "aborted exchange"]


@pytest.mark.parametrize("way", [*WAYS, pytest.param("no_world gather", marks=pytest.mark.every_change)])
def test_ranks_that_end_apart(job: Job, way: str) -> None:
    scenario, how = way.split()
    for first in sampling.share(way, FIRST, 2):
        outcome = job.run(3, "leaving.py", f"{scenario}-{first}", how, environment={"MPIPLUS_COLLECTIVES": "mpi-only"})
        outcome.ended().says(*(rf"\[{rank}\] end" for rank in range(3)))
        outcome.says_not("ends the job", "Traceback", "BAD TERM", "improperly")  # MPICH may tell of communicators


@pytest.mark.parametrize("how", ["shrunk", "ends"])
def test_survivors_that_end_apart(job: Job, how: str) -> None:
    for first in sampling.share(how, FIRST, 2):
        outcome = job.surviving(3, SCRIPTS / "leaving.py", f"dead-{first}", how).ended()
        outcome.says(r"\[0\] end", r"\[2\] end").says_not("ends the job", "Traceback")
