"""Child processes: what they may not do says so, and the parents go on and end in order."""

from __future__ import annotations

from job_runs import Job


def test_forked_children(job: Job) -> None:
    job.run(2, "forks.py", "forked").succeeded(2).says_not("child failed")


def test_worker_processes(job: Job) -> None:
    outcome = job.run(2, "forks.py", "worker_processes").succeeded(2)
    for method in ("fork", "spawn", "forkserver", "DataLoader works with fork", "DataLoader works with spawn"):
        outcome.says(method)
