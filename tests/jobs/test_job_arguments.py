"""Wrong arguments on one rank are refused there, at once, and hurt nobody."""

from __future__ import annotations

from job_runs import Job


def test_one_rank_makes_every_mistake(job: Job) -> None:
    job.run(2, "wrong_arguments.py", "one_rank_errs").succeeded(2)


def test_a_mistake_while_coalescing(job: Job) -> None:
    job.run(2, "wrong_arguments.py", "coalescing").succeeded(2)
