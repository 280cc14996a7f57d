"""Making a group goes wrong on one rank: nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import GRACE, SCRIPTS, SOON, Job
from patience import wait_until

SHARED = Path("/dev/shm")


def test_another_build_on_one_node(job: Job) -> None:
    outcome = job.run(3, "creation.py", "builds").came_to_an_end()
    assert outcome.stdout.count("] end\n") == 3, outcome.output


@pytest.mark.parametrize("where", ["steps", "MPI", "world"])
def test_a_rank_that_is_stopped(job: Job, where: str) -> None:
    """The others do not wait for it for ever. The communicator is lost to MPI, which may say so."""
    at_the_end = {"MPIPLUS_EXIT_GRACE": "1"}  # or two ranks would look for what is lost for ten seconds
    outcome = job.run(3, "creation.py", "stopped", where, job.directory, environment=at_the_end).came_to_an_end()
    # A thread never comes back from MPI, which is not finalised then: for Open MPI's launcher that is a failure.
    assert outcome.code == 0 or where == "MPI", outcome.output
    assert outcome.stdout.count("] end\n") == 3


@pytest.mark.parametrize("where", ["door", "MPI", "steps"])
def test_a_rank_that_vanishes(job: Job, where: str) -> None:
    """The others need not wait for the timeout, which is half an hour where new_group() is given none."""
    if job.installation.vendor == "Open MPI":
        outcome = job.surviving(3, SCRIPTS / "creation.py", "vanishes", where).came_to_an_end()
    else:
        outcome = job.torchrun(3, "creation.py", "vanishes", where).came_to_an_end()
    outcome.says(r"\[0\] end", r"\[2\] end").says_not("Traceback", "Segmentation", r"\[1\] end")
    outcome.within(SOON, since=job.directory / "vanishes")


def test_a_rank_that_is_killed_leaves_no_shared_memory(job: Job) -> None:
    before = set(SHARED.iterdir())
    job.run(2, "creation.py", "killed").failed("has made the file")
    wait_until(lambda: {file for file in SHARED.iterdir() if file.name.startswith("mpiplus")} <= before, GRACE)
