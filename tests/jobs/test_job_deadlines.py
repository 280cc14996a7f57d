"""Time limits under a real mpiexec, with ranks that are stopped, late or not there at all."""

from __future__ import annotations

import pytest
from job_runs import Job


@pytest.mark.parametrize(
    ("who", "how", "shared_memory"),
    [(0, "sync", "1"), (2, "async", "1"), (2, "sync", "0"), (0, "sync", "0")],
    ids=["rank0", "rank2-async", "rank2-without-shm", "rank0-without-shm"],
)
def test_a_rank_is_stopped(job: Job, who: int, how: str, shared_memory: str) -> None:
    """Also rank 0, which hosts the store. Nobody continues it before the others have given up."""
    outcome = job.run(3, "deadlines.py", "stopped", job.directory, who, how, environment={"MPIPLUS_SHM": shared_memory})
    outcome.succeeded(3).says("goes on")


def test_a_receives_deadline_and_a_slow_peer(job: Job) -> None:
    job.run(2, "deadlines.py", "messages", job.directory).succeeded(2)


def test_new_group_without_a_member(job: Job) -> None:
    job.run(3, "deadlines.py", "absent_member", job.directory).succeeded(3)


def test_a_rank_that_never_calls_init(job: Job) -> None:
    outcome = job.run(2, "deadlines.py", "no_init", job.directory)
    outcome.failed().says_not("AssertionError", "Segmentation")
    # Not by what rank 0 prints: the launcher may kill it, and drop its output, as soon as the other one ends.
    assert (job.directory / "gave-up-0").exists(), outcome.output
