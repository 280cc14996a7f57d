"""Processes that MPI's launcher did not start: a real world with MPICH, the right command to use with Open MPI."""

from __future__ import annotations

import socket

import pytest
from job_runs import Job


def can_join(job: Job) -> bool:
    return job.installation.vendor != "Open MPI"


#: What a process of an srun with one task per node sees, as which torchrun is often started.
IN_SLURM = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


@pytest.mark.parametrize("environment", [{}, IN_SLURM], ids=["", "in Slurm"])
def test_under_torchrun(job: Job, environment: dict[str, str]) -> None:
    outcome = job.torchrun(3, "joined.py", "trains", environment=environment)
    if can_join(job):
        outcome.succeeded(3)
    else:
        outcome.failed("were not started by MPI", "Open MPI", r"mpirun -n 3 python joined.py trains")


@pytest.mark.fresh("processes that torch spawns")
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_spawned_processes(job: Job, store: str) -> None:
    """No rank asks rank 0's store once that is gone: torch's log would show C++ backtraces."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"file://{job.directory}/store" if store == "file" else f"tcp://127.0.0.1:{port}"
    outcome = job.alone("joined.py", "spawned", url, 2).says_not("Exception raised from")
    if can_join(job):
        outcome.succeeded(1).says("member 0 of 2 is done", "member 1 of 2 is done")
    else:
        outcome.failed("its launcher did not start|were not started by MPI")


def test_a_rank_that_does_not_come(job: Job) -> None:
    outcome = job.torchrun(3, "joined.py", "absent")
    if can_join(job):
        outcome.succeeded(3)
    else:
        outcome.failed("its launcher did not start|were not started by MPI")
