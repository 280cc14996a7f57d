"""launch_subprocesses: from a plain process it starts the ranks, under mpirun it is in place."""

from __future__ import annotations

import socket

import pytest
from job_runs import Job

SCRIPT = "launches.py"


def test_four_ranks_from_a_plain_process(job: Job) -> None:
    outcome = job.alone(SCRIPT, "from_a_plain_process").succeeded(4)
    assert outcome.stdout.count("] again\n") == 4


def test_gloo(job: Job) -> None:
    job.alone(SCRIPT, "on_gloo").succeeded(2)


def test_gloo_over_tcp(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job.alone(SCRIPT, "on_gloo_over_tcp", port).succeeded(2)


def test_one_rank(job: Job) -> None:
    job.alone(SCRIPT, "alone").succeeded(2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_place_under_mpirun(job: Job, ranks: int) -> None:
    job.run(ranks, SCRIPT, "in_place", ranks).succeeded(ranks)


def test_another_size_under_mpirun(job: Job) -> None:
    job.run(2, SCRIPT, "of_another_size").succeeded(2)


@pytest.mark.parametrize(
    ("who", "how", "code"), [(0, "raise", 1), (1, "raise", 1), (2, "exit", 7), (1, "text", 1), (1, "kill", 137)]
)
def test_a_rank_that_fails(job: Job, who: int, how: str, code: int) -> None:
    outcome = job.alone(SCRIPT, "one_fails", who, how, code).says("parent end").says_not("came out")
    assert outcome.code == 0
    assert not outcome.survivors


def test_ctrl_c_ends_all(job: Job) -> None:
    outcome = job.alone(SCRIPT, "interrupted", job.directory).says("parent end")
    assert outcome.code == 0
    assert not outcome.survivors


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parallel_groups_in_every_factorisation(job: Job, ranks: int) -> None:
    job.run(ranks, SCRIPT, "factorisations").succeeded(ranks)
