"""`mpiplus bench --train` trains on all backends, tells all its figures, and does not measure a wrong training."""

from __future__ import annotations

import json
import math
import re

import pytest
from job_runs import Job, Outcome
from launch_runs import MPIPLUS_MODULE

from torchmpi_plugin.cli.bench.training.ways import WAYS

TRAIN = ("bench", "--train", "--quick", "--repeats", "1", "--samples", "2")
POSITIVE = ("samples_per_second", "step_seconds", "alone_seconds", "step_over_alone", "step_cpu_seconds")
TURNS = {"seconds", "cpu_seconds", "voluntary", "involuntary"}


def figures_of(job: Job, *options: str, ranks: int = 2) -> tuple[Outcome, dict]:
    file = job.directory / "figures.json"
    command = job.installation.command(ranks, [*MPIPLUS_MODULE, *TRAIN, *options, "--json", str(file)])
    outcome = job.start(command, None).ended().says_not("Traceback", "Warning")
    return outcome, json.loads(file.read_text())


@pytest.mark.slow
def test_every_row_is_there_and_trains_as_on_gloo(job: Job) -> None:
    outcome, found = figures_of(job)
    outcome.says(
        "threads of a rank", "mpiplus/", "step/", "hidden", "geometric mean of the rows", "left out by --quick"
    )
    assert found["facts"]["ranks"] == 2
    assert [note for note in found["notes"] if "left out by --quick" not in note] == []
    planned = {(way.name, task.name, dtype) for way in WAYS for task, dtype in way.quick}
    rows = {(row["way"], row["model"], row["dtype"]): row for row in found["training"]}
    assert set(rows) == planned
    for row in rows.values():
        assert 0 < row["ratio"]["mpiplus/gloo"] < math.inf
        assert set(row["backends"]) == {"mpiplus", "gloo"}
        for figures in row["backends"].values():
            check_figures(figures, bool(row["bucket_bytes"]))
        ours, theirs = (row["backends"][name]["losses"] for name in ("mpiplus", "gloo"))
        assert all(math.isclose(*pair, rel_tol=row["loss_tolerance"]) for pair in zip(ours, theirs, strict=True))
        assert ours[-1] < ours[0]
    check_buckets(rows)


def check_figures(figures: dict, has_buckets: bool) -> None:
    assert all(0 < figures[name] < math.inf for name in POSITIVE)
    assert all(math.isfinite(figures[name]) for name in ("exposed_seconds", "exposed_spread_seconds"))
    assert 0 <= figures["waiting_share"] <= 1
    assert set(figures["turns"]) == {"step", "alone"} | ({"all_reduce"} if has_buckets else set())
    for turns in figures["turns"].values():
        assert set(turns) == TURNS
        assert all(len(turns[name]) == 1 for name in TURNS)
    if has_buckets:
        assert 0 <= figures["overlap_share"] <= 1
    else:
        assert figures["overlap_share"] is None


def check_buckets(rows: dict) -> None:
    """All of DDP's ways have some, and 25 MiB make fewer of them."""
    of = {name: row["bucket_bytes"] for name, row in rows.items()}
    small, large = of["ddp", "CNN", "float32"], of["ddp25", "CNN", "float32"]
    assert len(small) > len(large) >= 1
    assert sum(small) == sum(large) == 2 * sum(of["ddp", "CNN", "bfloat16"])
    assert {way for (way, _, _), buckets in of.items() if not buckets} == {"fsdp2", "pipeline", "tensor"}


@pytest.mark.slow
def test_each_backend_is_trained_on_itself(job: Job) -> None:
    """Equal losses do not show that: what torch keeps of one group may serve another, as where two meshes are equal."""
    outcome = job.run(2, "whose_steps.py").succeeded(2)
    told = re.findall(r"rank (\d): (\S+) on (\w+): (.*)", outcome.output)
    wanted = {"mpiplus": "mpiplus", "gloo": "not mpiplus", "alone": "not mpiplus"}
    ways = [(str(rank), way.name) for rank in (0, 1) for way in WAYS]
    assert sorted(told) == sorted((*way, *pair) for way in ways for pair in wanted.items())


@pytest.mark.every_change
@pytest.mark.slow
def test_only_the_ways_that_are_named(job: Job) -> None:
    _, found = figures_of(job, "--train=sleep")
    assert [row["way"] for row in found["training"]] == ["sleep"]


def test_a_wrong_training_is_an_error(job: Job) -> None:
    """Said once; and no figure is."""
    outcome = job.run(2, "wrong_sums.py", *TRAIN).failed(
        "Error: ddp, CNN of float32: mpiplus and gloo train differently"
    )
    outcome.says_not("Traceback", "hidden")
    assert outcome.output.count("Error: ") == 1
