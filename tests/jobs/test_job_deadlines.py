"""Time limits under a real mpiexec, with ranks that are stopped, late or not there at all."""

from __future__ import annotations

import re

import pytest
from job_runs import SOON, Job


@pytest.mark.parametrize(
    ("who", "how", "collectives"),
    [(0, "sync", "auto"), (2, "async", "auto"), (2, "sync", "mpi-only"), (0, "sync", "mpi-only")],
    ids=["rank0", "rank2-async", "rank2-without-shm", "rank0-without-shm"],
)
def test_a_rank_is_stopped(job: Job, who: int, how: str, collectives: str) -> None:
    """Also rank 0, which hosts the store. Nobody continues it before the others have given up."""
    outcome = job.run(
        3, "deadlines.py", "stopped", job.directory, who, how, environment={"MPIPLUS_COLLECTIVES": collectives}
    )
    outcome.succeeded(3).says("goes on")


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_rank_is_stopped_inside_its_call(job: Job, shared_memory: str) -> None:
    """It is named, also where the others have seen it arrive."""
    environment = {"MPIPLUS_SHM": shared_memory}
    outcome = job.run(3, "deadlines.py", "stopped_inside", job.directory, environment=environment).came_to_an_end()
    outcome.says_not("AssertionError")
    since = " since: rank 2" if shared_memory == "1" else ": stopped"
    assert len(re.findall(f"gave up: .*gave no answer{since}", outcome.stdout)) == 2, outcome.output


@pytest.mark.parametrize("where", ["initialised", "never", "first", "stopped", "barrier", "raises"])
def test_init_process_group_without_a_rank(job: Job, where: str) -> None:
    """Who waits for it ends, with the reason, and with it the job: in MPI_Init, before there is a store, and while it
    is made. The timeout is 5 s."""
    outcome = job.run(3, "deadlines.py", "init_without", where, environment={"MPIPLUS_WATCHDOG": "2"})
    reason = {
        "initialised": "after 5 s not all of MPI's 3 ranks have called it",
        "never": r"has waited 2 s in MPI_Init(.|\n)*MPI_Init has not come back after 5 s",
        "stopped": "gave up after 5 s: MPI rank 1 began this too, and stopped half-way",
        "raises": "nothing goes any more",
    }
    reason["first"] = reason["barrier"] = reason["stopped"]
    if where == "never" and job.installation.vendor == "Open MPI":
        # Its MPI_Init does not wait for the others; the next step does.
        reason["never"] = f"{reason['never']}|{reason['initialised']}"
    outcome.failed(reason[where]).says_not("came out of it").within(SOON, since=job.directory / "begins-0")


def test_a_backward_pass_without_a_rank(job: Job) -> None:
    """An error, where DDP's reducer used to find no gradients in the failed future: SIGSEGV."""
    job.run(2, "deadlines.py", "backward", job.directory).says_not("Segmentation").says("goes on(.|\n)*goes on")
