"""What is done on the way of an error, an answer or a report never raises, and never ends a thread."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job_runs import SCRIPTS, Job
from test_status import asked, running, status_json, told_when_waiting


@pytest.mark.slow
def test_helpers_that_raise(job: Job) -> None:
    job.run(2, "broken_helpers.py", environment={"TORCH_FR_DUMP_ON_TIMEOUT": "1"}).succeeded(2)


@pytest.mark.parametrize("what", ["split", "dropped", "failed", "thread"])
def test_a_process_that_is_asked(job: Job, what: str) -> None:
    """It tells all: which groups it has, its stacks, and where its trace is."""
    command = job.installation.command(2, [str(SCRIPTS / "asked.py"), what])
    with running(job, command, 2) as environment:
        told_when_waiting(environment, "rank 0 waits")
        groups = status_json(environment)["ranks"][0]["groups"]
        assert any(group["missing"] == [1] for group in groups)
        names = ["default_pg", *(['a "part"'] if what == "split" else [])]
        assert sorted(group["name"] for group in groups) == sorted(names)
        assert [group["calls"] for group in groups if group["name"] == 'a "part"'] == [1] * (what == "split")
        stacks = asked(environment, "--stacks", 1).stdout
        assert re.search(r'asked\.py", line \d+ in sleeps', stacks), stacks
        traces = re.findall(r"(?m)^rank \d.*:\n(/.*)$", asked(environment, "--dump").stdout)
        assert [Path(trace).exists() for trace in traces] == [True, True], traces


def test_a_summary_that_cannot_be_written(job: Job) -> None:
    """The job has done its work."""
    environment = {"MPIPLUS_SUMMARY": "/nowhere/figures.json"}
    job.run(3, "counted.py", environment=environment).succeeded(3).says(
        "time in communication, 3 ranks", "the summary is not in /nowhere/figures.json: FileNotFoundError"
    )
