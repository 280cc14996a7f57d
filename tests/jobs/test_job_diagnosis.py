"""What the error, or the watchdog's line, says about the rank that is waited for."""

from __future__ import annotations

import pytest
from job_runs import SCRIPTS, SOON, Job


@pytest.mark.parametrize("collectives", ["auto", "mpi-only"])
def test_different_calls_at_a_timeout(job: Job, collectives: str) -> None:
    """The last rank does not come, so that neither MPI nor the shared memory can tell."""
    outcome = job.run(3, "diagnosis.py", "disagree", job.directory, environment={"MPIPLUS_COLLECTIVES": collectives})
    outcome.failed().says_not("AssertionError", "Segmentation")
    # Not by what they print: the launcher may drop that, as no rank ends in order.
    assert all((job.directory / f"told-{rank}").exists() for rank in range(2)), outcome.output


def test_the_watchdog_speaks_and_the_job_goes_on(job: Job) -> None:
    outcome = job.run(2, "diagnosis.py", "slow_peer", job.directory, environment={"MPIPLUS_WATCHDOG": "1"})
    outcome.succeeded(2)
    outcome.says(r"mpiplus: rank 0 has waited \d+ s for all_reduce.*goes on waiting.*Not arrived: rank 1.*load_batch")


def test_the_watchdog_can_be_switched_off(job: Job) -> None:
    outcome = job.run(2, "diagnosis.py", "unheard_peer", environment={"MPIPLUS_WATCHDOG": "0"})
    outcome.succeeded(2).says_not("has waited")


@pytest.mark.parametrize("how", ["killed", "_exit(0)"])
def test_a_rank_that_vanishes(job: Job, how: str) -> None:
    """Most launchers end the job at once; where the launcher is torchrun, the others notice."""
    vanished = job.directory / "vanishes"
    outcome = job.run(3, "diagnosis.py", "vanishes", how).came_to_an_end()
    outcome.within(SOON, since=vanished).says_not("came out", r"\] end")
    if job.installation.vendor == "Open MPI" or how == "killed":
        outcome.failed()  # MPICH's mpiexec ends the others in each case, but here one time in four returns 0
    else:
        outcome = job.torchrun(3, "diagnosis.py", "vanishes", how)
        outcome.failed("RankFailedError", r"waiting for rank 2, but rank 2 \(process \d+\) has ended without a word")
        outcome.within(SOON, since=vanished)


def test_a_rank_that_dies_halfway(job: Job) -> None:
    """It has come, which the others see, and its data has not: under launchers that leave the others alone."""
    if job.installation.vendor == "Open MPI":
        outcome = job.surviving(3, SCRIPTS / "diagnosis.py", "vanishes", "killed", "halfway", grace=SOON)
        outcome.came_to_an_end()
    else:
        outcome = job.torchrun(3, "diagnosis.py", "vanishes", "_exit(0)", "halfway").failed()
    outcome.says("RankFailedError", "rank 2 .*(has ended without a word|has died)").says_not("came out")
    outcome.within(SOON, since=job.directory / "vanishes")
