"""``mpiplus info``: everything about MPI, the launcher and this machine that settles why a job does not work."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from ...flavours import Library
from ...launchers.variables import TORCHRUN, started_by, who_am_i
from ...names import counted
from ...seconds import LONGEST, Seconds

_PAIR_SHARE = 1 / 6  # of all the time: the pairs, the reports and the result each have deadlines made of it


@click.command()
@click.option("-v", "--verbose", is_flag=True, help="Print all variables, those that a launcher sets for itself too.")
@click.option("--job", is_flag=True, help="Under mpirun, tell too what a group of all ranks costs in memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Seconds(min=1, max=LONGEST),
    default=30.0,
    show_default=True,
    help="For everything that MPI is asked.",
)
def info(*, verbose: bool, job: bool, as_json: bool, timeout: float) -> None:
    """Tell what MPI is here, and what is wrong with it.

    Under mpirun it also tells where the ranks are, and tries whether each rank can talk to each other one. The exit
    code is 1 if there is a problem that keeps jobs from working. Put the output into a bug report.
    """
    facts = collect(timeout, job)
    if facts["prints"]:
        del facts["prints"]
        if as_json:
            click.echo(json.dumps(facts, indent=2))
        else:
            from . import report

            report.show(facts, verbose)
        sys.stdout.flush()
    sys.exit(int(any(problem["serious"] for problem in facts["problems"])))


def collect(seconds: float, groups: bool = False) -> dict[str, Any]:
    """Find everything out, within a time; with ``groups`` also what a group of all ranks costs."""
    from . import advice, machine
    from .report import nodes_of
    from .worker import ask_mpi

    launch = started_by(os.environ)
    me = who_am_i(os.environ)
    facts: dict[str, Any] = {"versions": machine.versions(), "host": machine.describe()}
    facts["started_by"] = f"{launch.launcher}, {counted(launch.size, 'rank')} ({launch.variable})" if launch else ""
    answers, error = ask_mpi(seconds, seconds * _PAIR_SHARE, groups)
    reports = answers.pop("reports", {})
    facts.update(answers)
    facts["mpi_error"] = error
    facts["nodes"] = nodes_of(reports)
    if groups and facts.get("size") == 1:
        facts["group"] = {
            "problem": "this is one rank alone. Start it as you start the job: mpirun -n 4 mpiplus info --job"
        }
    by_torchrun = launch is not None and launch.launcher == TORCHRUN
    rank = int(os.environ.get("RANK", "0")) if by_torchrun else me.rank if me is not None else facts.get("rank", 0)
    facts["prints"] = rank == 0
    if facts["prints"]:
        facts.update(_launcher(answers.get("library")))
    facts["variables"] = machine.variables(os.environ)
    facts["mpi_wheels"] = machine.mpi_wheels()
    facts["problems"] = [found._asdict() for found in advice.advise(facts, launch, os.environ)]
    if not facts.pop("met", True) and not facts["problems"]:
        facts["problems"] = [{"text": "rank 0 has found pairs of ranks that cannot talk", "serious": True}]
    if facts.get("size", 1) == 1 and not facts["prints"]:
        facts["problems"] = []  # a launcher ends rank 0 where another rank fails first, and rank 0 is to tell
    return facts


def _launcher(library: dict[str, Any] | None) -> dict[str, Any]:
    from ...launchers.mpirun import LauncherError, find_launcher

    try:
        return {"launcher": asdict(find_launcher(library=Library(**library) if library else None))}
    except LauncherError as error:
        return {"launcher": None, "launcher_error": str(error)}
