"""mpi4py beside us: who starts and ends MPI, with which threads, and whose messages are whose."""

from __future__ import annotations

import pytest
from job_runs import Job


def test_mpi_that_the_program_started_is_left_running(job: Job) -> None:
    job.run(2, "beside_mpi4py.py", "initialised_before").succeeded(2)


def test_mpi_that_we_started_is_finalised(job: Job) -> None:
    """The program's own MPI_Finalize comes after ours, and MPI says that it is the second one."""
    outcome = job.run(2, "beside_mpi4py.py", "initialised_by_us")
    outcome.failed(r"\[0\] end", r"\[1\] end", "(?i)after MPI_Finalize was invoked|after finalizing")


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_lower_thread_levels(job: Job, level: str) -> None:
    job.run(2, "beside_mpi4py.py", "thread_level", level).succeeded(2)


def test_the_programs_own_communicators(job: Job) -> None:
    job.run(4, "beside_mpi4py.py", "own_communicators").succeeded(4)


@pytest.mark.under_each
def test_the_programs_own_mpi_moves_while_a_rank_waits(job: Job) -> None:
    """Windows, reductions and long messages of mpi4py's, in each of our calls that wait."""
    job.run(2, "progressing.py", "each").succeeded(2)
