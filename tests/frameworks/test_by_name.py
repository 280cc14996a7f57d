"""The name "mpiplus" where the frameworks' own lists refuse it: with the variable, and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from framework_runs import Launchers, Outcome

SCRIPTS = Path(__file__).parent / "scripts"
ACCELERATED, PARSED, IGNITED = (SCRIPTS / f"{name}.py" for name in ("accelerated", "parsed", "ignited"))
REFUSED = "Your assigned backend mpiplus is not available|Default process group has not been initialized"
ALONE = "so each of the 2 ranks that .* has started trains alone, with num_processes=1.*backend="


def together(outcome: Outcome) -> Outcome:
    """Both ranks take part in one world on mpiplus."""
    return outcome.ended().says("<0 of 2 on mpiplus>", "<1 of 2 on mpiplus>").says_not("leaves .* as it is")


@pytest.mark.parametrize("ways", [["name"], ["name", "cpu"], ["first"], ["first", "cpu"], ["first", "name"]], ids=str)
def test_accelerate(launchers: Launchers, ways: list[str]) -> None:
    together(launchers.mpirun(ACCELERATED, *ways, MPIPLUS_INTEGRATIONS="accelerate")).says_not(ALONE)


@pytest.mark.parametrize("ways", [["name"], ["name", "cpu"]], ids=str)
def test_accelerate_refuses_without(launchers: Launchers, ways: list[str]) -> None:
    """If this fails, a release of Accelerate takes the name: the integration can go."""
    launchers.mpirun(ACCELERATED, *ways).failed(REFUSED)


def test_each_rank_alone_is_told_once(launchers: Launchers) -> None:
    outcome = launchers.mpirun(ACCELERATED, MPIPLUS_INTEGRATIONS="accelerate").ended().says(ALONE)
    assert len(re.findall(ALONE, outcome.output)) == 1
    assert outcome.stdout.count("<0 of 1 on None>") == 2


@pytest.mark.parametrize("cpu", [[], ["--use_cpu"]], ids=str)
def test_transformers_command_line(launchers: Launchers, cpu: list[str]) -> None:
    words = ["--output_dir", "output", "--ddp_backend", "mpiplus", "--report_to", "none", *cpu]
    together(launchers.mpirun(PARSED, *words, MPIPLUS_INTEGRATIONS="transformers"))


def test_transformers_refuses_without(launchers: Launchers) -> None:
    launchers.mpirun(PARSED, "--output_dir", "output", "--ddp_backend", "mpiplus").failed("invalid choice: 'mpiplus'")


@pytest.mark.parametrize("ways", [[], ["first"]], ids=str)
def test_ignite(launchers: Launchers, ways: list[str]) -> None:
    outcome = together(launchers.mpirun(IGNITED, *ways, MPIPLUS_INTEGRATIONS="ignite"))
    assert outcome.stdout.count("DistributedDataParallel") == 2


def test_ignite_refuses_without(launchers: Launchers) -> None:
    launchers.mpirun(IGNITED).failed("Unknown backend 'mpiplus'")
    outcome = launchers.mpirun(IGNITED, "first")
    assert outcome.stdout.count(" on mpiplus> Linear") == 2, "ranks that train alone, which the integration is for"
