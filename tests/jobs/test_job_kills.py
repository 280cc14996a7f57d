"""A rank that is killed at any moment of a random program: the job ends, and nothing is left of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from job_runs import Job
from patience import wait_until

PROGRAMS = Path(__file__).parents[1] / "soak" / "programs.py"
#: From the death to the end of the job, also on a busy machine. What docs/usage.md calls "within seconds".
BOUND = 45.0


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("mpiplus-*")}


def check_nothing_left(before: set[str]) -> None:
    """Other jobs of this machine have segments with a name too, for a moment each."""
    left = segments() - before
    wait_until(lambda: not left.intersection(segments()), 10, f"of these are some left: {left}")


@pytest.mark.parametrize("collectives", ["auto", "mpi-only"], ids=["shm", "mpi"])
def test_the_job_ends(job: Job, collectives: str) -> None:
    before, seed, at = segments(), random.randrange(1000), 0.2 + 2 * random.random()
    arguments = "../../soak/programs.py", 600, seed, seed % 3, at
    outcome = job.run(3, *arguments, environment={"MPIPLUS_COLLECTIVES": collectives})
    outcome.failed().says_not("Segmentation", "Fatal Python error", r"soak: \d+").within(BOUND + at + 30)
    check_nothing_left(before)


@pytest.mark.parametrize(("victim", "collectives"), [(0, "auto"), (0, "mpi-only"), (1, "mpi-only"), (2, "auto")])
def test_survivors_say_why(job: Job, collectives: str, victim: int) -> None:
    """Where the launcher leaves them alone, they find out by themselves, and end with a message.

    With ULFM it ends before them all, and in about one run of ten with exit code 0: neither is ours to change.
    """
    before, seed, at = segments(), random.randrange(1000), 0.2 + 2 * random.random()
    arguments, environment = (600, seed, victim, at), {"MPIPLUS_COLLECTIVES": collectives}
    outcome = job.surviving(3, PROGRAMS, *arguments, environment=environment, grace=BOUND)
    outcome.came_to_an_end().says("has ended without a word|has died|which left this group|ends the job")
    outcome.within(BOUND + at + 30)
    outcome.says_not("Segmentation", "Fatal Python error")
    check_nothing_left(before)
