"""Wrong variables: an error that names the variable, on the rank that has it, before anybody waits."""

from __future__ import annotations

import re

import pytest
from job_runs import Job, free_port


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MPIPLUS_CUDAA", "the variable MPIPLUS_CUDAA means nothing: did you mean MPIPLUS_CUDA[?]"),
        ("MPIPLUS_SHM", "MPIPLUS_SHM is deprecated: in place of 0 set MPIPLUS_COLLECTIVES=mpi-only"),
    ],
    ids=["misspelt", "deprecated"],
)
def test_a_wrong_name_is_told_once(job: Job, name: str, words: str) -> None:
    outcome = job.run(2, "variables.py", "works+works", environment={name: "0"}).succeeded(2)
    told = re.findall(words, outcome.output)
    if len(told) != 1:
        outcome.problem(f"it was told {len(told)} times")


@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:{}"])
def test_a_port_in_use_where_torch_makes_the_store(job: Job, method: str) -> None:
    """The traceback ends at the user's line."""
    outcome = job.run(2, "variables.py", "port_in_use", method)
    outcome.says_not("/torchmpi_plugin/").failed(r"\(MASTER_PORT, or init_method's\) is in use: by another job")


def test_an_address_that_is_not_rank_0s(job: Job) -> None:
    job.run(2, "variables.py", "address_of_nobody").succeeded(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_open_few_files(job: Job, rank: int) -> None:
    """It is named before MPI starts, which may end it without saying who it is; for the store they do not suffice."""
    outcome = job.run(2, "variables.py", "few_files", str(rank)).succeeded(2)
    outcome.says(rf"rank {rank} on .*only 48 files may be open \(`ulimit -n`\)")


def test_one_process_started_and_four_said(job: Job) -> None:
    said = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job.run(1, "variables.py", "fewer_than_said", environment=said).succeeded(1)


def test_the_store_of_one_node_is_on_the_loopback(job: Job) -> None:
    job.run(2, "variables.py", "loopback").succeeded(2).says("asked [1-9]")
