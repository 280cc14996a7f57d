"""`mpiplus info` tells what there is, within its time, and names what does not work."""

from __future__ import annotations

import json

import pytest
from job_runs import SCRIPTS, Job, torchrun
from launch_runs import MPIPLUS, MPIPLUS_MODULE, mpiplus


def test_alone(job: Job) -> None:
    outcome = mpiplus(job, "info").ended().says_not("Traceback", "PROBLEM")
    outcome.says("mpi4py +[0-9]", "MPI_THREAD_MULTIPLE", "CUDA-aware", "belongs to the library", "/dev/shm", "CMA")
    assert max(map(len, outcome.stdout.splitlines())) <= 132


@pytest.mark.every_change
def test_under_a_launcher(job: Job) -> None:
    """Rank 0 speaks for all, once."""
    command = job.installation.command(3, [*MPIPLUS_MODULE, "info"])
    outcome = job.start(command, {"MPIPLUS_CUDA": "ipc"}).ended().says_not("Traceback")
    assert outcome.stdout.count("mpiplus info") == 1
    outcome.says("started by", "3 ranks on 1 node", "ranks 0-2 on", "every pair of ranks can")
    outcome.says("read from the other devices of the node .* MPIPLUS_CUDA says ipc")


def test_what_a_group_costs(job: Job) -> None:
    """For the layout of the job that it is started in, and the way that its variables choose."""
    command = job.installation.command(2, [*MPIPLUS_MODULE, "info", "--job", "--json"])
    shared, asked = {"MPIPLUS_COLLECTIVES": "auto"}, {"MPIPLUS_COLLECTIVES": "mpi"}
    group = json.loads(job.start(command, shared).ended().stdout)["group"]
    (place,) = group["nodes"]
    rows = ["cuda_copies", "cuda_sums", "cuda_slot_sums", "cuda_reductions"]  # two ranks of a node: one phase
    assert [*group["selection"]] == rows
    assert 512 << 10 < place["segment_bytes"] < place["free_bytes"]
    assert 0 < place["rank_bytes"] < 4 << 10
    assert place["rank_bytes_later"] == 0
    found = json.loads(job.start(command, asked).ended().stdout)
    assert found["group"] == {"path": "MPI's collectives", "selection": {}, "nodes": []}


def test_what_a_group_costs_is_asked_of_the_job(job: Job) -> None:
    mpiplus(job, "info", "--job").ended().says("note: .*one rank alone.*mpirun -n 4 mpiplus info --job")
    command = job.installation.command(2, [*MPIPLUS_MODULE, "info"])
    job.start(command, None).ended().says("every pair of ranks can").says_not("a group of all")


def test_under_torchrun(job: Job) -> None:
    """Its ranks are no mistake where this MPI can make a world of them."""
    outcome = job.start(torchrun(2, "--no-python", MPIPLUS, "info"), None)
    assert outcome.stdout.count("mpiplus info\n") == 1
    if job.installation.vendor == "Open MPI":
        outcome.failed("PROBLEM: torchrun started 2 ranks", "Open MPI takes only those of its own launcher")
    else:
        outcome.ended().says("note: torchrun started 2 ranks", "torchrun's ranks").says_not("belong together")


def test_a_rank_that_does_not_talk(job: Job) -> None:
    outcome = job.start(job.installation.command(4, [str(SCRIPTS / "silent_rank.py"), "--timeout", "18"]), None)
    outcome.failed("3 of 6 pairs of ranks cannot", "PROBLEM: rank 2 on node .* talks to no other rank")
    assert outcome.stdout.count("mpiplus info") == 1


@pytest.mark.parametrize(
    "words", ["info", "bench --quick", pytest.param("run -n 2 -c echo hi", marks=pytest.mark.every_change)]
)
def test_without_mpi(job: Job, words: str) -> None:
    environment = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPIPLUS_TEST_INSTALLATIONS": ""}  # has tracebacks of its own
    outcome = mpiplus(job, *words.split(), environment=environment).ended(1)
    outcome.says("no usable MPI library", "pip install|MPI4PY_LIBMPI=(?!/nowhere)").says_not("Traceback", r"\] hi")
    assert words != "info" or ("PROBLEM: " in outcome.output and "none that works" in outcome.output)
