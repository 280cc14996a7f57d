"""`mpiplus bench` as a job: its table, its files, and what it refuses before it measures."""

from __future__ import annotations

import json

import pytest
from job_runs import Job, Outcome
from launch_runs import MPIPLUS_MODULE

CONTESTANTS = ["raw", "raw nonblocking", "mpiplus", "gloo", "front end"]
OPERATIONS = 7


def bench(job: Job, *words: object, ranks: int = 2) -> Outcome:
    return job.start(job.installation.command(ranks, [*MPIPLUS_MODULE, "bench", *map(str, words)]), None)


@pytest.mark.slow
def test_quick(job: Job) -> None:
    """Everything, in numbers and in a picture."""
    pytest.importorskip("matplotlib", reason="the extra plot brings it")
    outcome = bench(job, "--quick", "--json", "out.json", "--plot", "out.png").ended().says_not("Traceback")
    outcome.says("plain messages of MPI, rank 0 on .* and rank 1 on .* GB/s each way", "async overlap")
    assert outcome.stdout.count("mpiplus bench\n") == 1  # rank 0 speaks for all
    assert max(map(len, outcome.stdout.splitlines())) <= 132
    found = json.loads((job.directory / "out.json").read_text())
    assert found["contestants"] == CONTESTANTS
    rows = found["operations"]
    assert len({row["operation"] for row in rows}) == OPERATIONS
    for row in rows:
        assert all(row["us"][name] > 0 for name in ("mpiplus", "gloo", "front end")), row
        assert row["dtype"] == "bfloat16" or row["us"]["raw nonblocking"] > 0, row
        assert (row["bus_gb_per_s"]["mpiplus"] or 0) > 0 or row["operation"] == "barrier", row
    assert {overlap["contestant"] for overlap in found["overlap"]} == {"raw nonblocking", "mpiplus", "gloo"}
    link = found["point_to_point"]
    assert link["ranks"] == [0, 1] and link["latency_us"] > 0 and link["gb_per_s"] > 0
    assert (job.directory / "out.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.every_change
def test_contestants_that_are_chosen(job: Job) -> None:
    words = ("--no-nonblocking", "--no-front-end", "--backends", "mpiplus", "--ops", "ping_pong", "--sizes", "8")
    bench(job, *words, "--repeats", 1, "--json", "out.json").ended()
    found = json.loads((job.directory / "out.json").read_text())
    assert found["contestants"] == ["raw", "mpiplus"]
    assert [sorted(row["us"]) for row in found["operations"]] == [["mpiplus", "raw"]]


@pytest.mark.slow
def test_beside_processes_that_compute(job: Job) -> None:
    words = ("--quick", "--busy", 2, "--no-raw", "--no-front-end", "--ops", "barrier", "--repeats", 1)
    bench(job, *words).ended().says("compute beside the ranks of each node: 2")


def test_one_rank_measures_what_is_left_without_communication(job: Job) -> None:
    words = ("--quick", "--ops", "all_reduce", "--sizes", "8", "--json", "out.json")
    bench(job, *words, ranks=1).ended().says("One process alone").says_not("Traceback", "plain messages")
    found = json.loads((job.directory / "out.json").read_text())
    assert found["point_to_point"] is None
    assert found["operations"][0]["bus_gb_per_s"]["mpiplus"] is None


def test_a_directory_that_is_not_there(job: Job) -> None:
    """Rank 0 says so, once, before anything is measured."""
    outcome = bench(job, "--quick", "--json", "missing/out.json").ended(1)
    outcome.says("Error: missing/out.json cannot be written: there is no directory missing").says_not("Traceback")
    assert outcome.output.count("Error: ") == 1
    outcome.says_not("plain messages")


def test_tuning_what_has_one_way_only(job: Job) -> None:
    outcome = bench(job, "--quick", "--tune", "--ops", "barrier", ranks=3).ended(1)
    outcome.says("Error: --tune compares all_reduce, of which --ops names none").says_not("Traceback", "plain messages")
    assert outcome.output.count("Error: ") == 1
    assert not (job.directory / "mpiplus-tuning.json").exists()
