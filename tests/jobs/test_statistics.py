"""Figures of operations, and the word at the end on who was slow."""

from __future__ import annotations

import json
import re

import pytest
from job_runs import SCRIPTS, Job
from launch_runs import mpiplus


def test_figures_and_no_summary(job: Job) -> None:
    job.run(3, "counted.py").succeeded(3).says_not("waited for longest")


@pytest.mark.every_change
def test_the_straggler_by_name(job: Job) -> None:
    """After destroy_process_group, and at the end of a program that does without."""
    for words in ((), ("stay",)):
        outcome = job.run(3, "counted.py", *words, environment={"MPIPLUS_SUMMARY": "figures.json"}).succeeded(3)
        outcome.says("rank 1 was waited for longest: [0-9.]+ s of other ranks' time", "(?m)^ +2 +[0-9.]+% +[0-9.]+%")
        assert outcome.stderr.count("was waited for longest") == 1
        figures = json.loads((job.directory / "figures.json").read_text())
        assert sorted(figures) == ["0", "1", "2"]
        assert figures["0"]["waited_for"]["1"] > 1 > figures["1"]["waiting"]


def test_each_way_of_waiting_counts(job: Job) -> None:
    """A call, wait(), a future, a callback and DDP have waited as long as the calls of the ranks lie apart."""
    job.run(3, "late.py").succeeded(3)


def test_mpiplus_run_summary(job: Job) -> None:
    outcome = mpiplus(job, "run", "-n", 3, "--summary", SCRIPTS / "counted.py").ended()
    assert re.search(r"\[rank 0\] mpiplus: rank 1 was waited for longest", outcome.stderr)
