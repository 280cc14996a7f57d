"""Processes that MPI's launcher did not start: a real world with MPICH, the right command to use with Open MPI."""

from __future__ import annotations

import pytest
from job_runs import Job, free_port


def can_join(job: Job) -> bool:
    return job.installation.vendor != "Open MPI"


#: What a process of an srun with one task per node sees, as which torchrun is often started.
IN_SLURM = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


def test_under_torchrun(job: Job) -> None:
    outcome = job.torchrun(3, "joined.py", "trains", environment=IN_SLURM)
    if can_join(job):
        outcome.succeeded(3)
    else:
        outcome.failed("were not started by MPI", "Open MPI", r"mpirun -n 3 python joined.py trains")


@pytest.mark.fresh("processes that torch spawns")
@pytest.mark.parametrize("how", ["file", "tcp", "spawn", "fork"])
def test_spawned_processes(job: Job, how: str) -> None:
    """No rank asks rank 0's store once that is gone: torch's log would show C++ backtraces. One may start another."""
    url = f"file://{job.directory}/store" if how == "file" else f"tcp://127.0.0.1:{free_port()}"
    function, *given = ("spawned", url, 2) if how in ("file", "tcp") else ("parent", url, how)
    outcome = job.alone("joined.py", function, *given).says_not("Exception raised from")
    if can_join(job):
        outcome.succeeded(1).says("member 0 of 2 is done", "member 1 of 2 is done")
    else:
        outcome.failed("its launcher did not start|were not started by MPI")


@pytest.mark.slow
@pytest.mark.under_each
@pytest.mark.fresh("multiprocessing starts Python anew, with what its parent has")
@pytest.mark.parametrize("how", ["", "tcp://127.0.0.1:"])
def test_ranks_by_spawn(job: Job, how: str) -> None:
    """Below a launcher that has started one process, by variables and by arguments."""
    outcome = job.run(1, "joined.py", "spawned", f"{how}{free_port()}", 2)
    if can_join(job):
        outcome.succeeded(1).says("member 0 of 2 is done", "member 1 of 2 is done")
    else:
        outcome.failed(r"multiprocessing \(mp.spawn\) started these 2 processes", "without rank.*mpirun -n 2 python")


@pytest.mark.slow
@pytest.mark.under_each
@pytest.mark.fresh("multiprocessing starts Python anew, with what its parent has")
def test_a_rank_that_starts_a_program(job: Job) -> None:
    outcome = job.run(2, "joined.py", "program").succeeded(2)
    assert outcome.stdout.count("a world of 1") == 2, outcome.output


def test_a_rank_that_does_not_come(job: Job) -> None:
    outcome = job.torchrun(3, "joined.py", "absent")
    if can_join(job):
        outcome.succeeded(3)
    else:
        outcome.failed("its launcher did not start|were not started by MPI")
