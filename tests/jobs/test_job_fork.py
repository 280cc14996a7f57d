"""Child processes: what they may not do says so, and the parents go on and end in order."""

from __future__ import annotations

from job_runs import Job


def test_forked_children(job: Job) -> None:
    job.run(2, "forks.py", "forked").succeeded(2).says_not("child failed")


def test_worker_processes(job: Job) -> None:
    outcome = job.run(2, "forks.py", "worker_processes").succeeded(2)
    for method in ("fork", "spawn", "forkserver"):
        outcome.says(rf"\] {method} works", f"DataLoader works with {method}")


def test_workers_that_come_to_init(job: Job) -> None:
    """MPI must not start in them: it would take them for the rank, and break that one."""
    outcome = job.run(2, "unguarded.py")
    outcome.failed("is a rank of a job, and is no rank itself", "__main__", "worker.* exited unexpectedly")
    outcome.says_not("Segmentation", "Process received signal")
