"""The options ``--max-restarts`` and ``--nnodes MIN:MAX`` of ``mpiplus run``, from the words of the command line."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ...jobs.attempts import Restarts, SpareNodes, parse_restart_on
from ...jobs.job import run_job
from ...jobs.spec import JobSpec
from ...launchers.batch import allocated_nodes
from ...launchers.layout import named_nodes
from .options import NodeRange

_ANSWER_SECONDS = 20.0  # for a node that may be lost to start something


def restarts_of(given: Mapping[str, Any]) -> Restarts:
    try:
        ends = parse_restart_on(given["restart_on"] or "any")
    except ValueError as error:
        raise click.UsageError(f"--restart-on: {error}") from None
    return Restarts(given["max_restarts"], ends, given["timeout"], given["attempt_timeout"])


def nodes_to_choose_from(
    wanted: int | NodeRange | None, may_restart: bool, hosts: str | None, hostfile: str | None
) -> list[str]:
    """The nodes to choose from, where a number of them is wanted; none: mpirun's choice."""
    if wanted is None or (not may_restart and not isinstance(wanted, NodeRange)):
        return []
    try:
        named = [each.name for each in named_nodes(hosts, hostfile)] or allocated_nodes(os.environ)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if isinstance(wanted, NodeRange) and len(named) < wanted.least:
        there = f"{len(named)} of them" if named else "none"
        raise click.UsageError(
            f"--nnodes {wanted.least}:{wanted.most} needs the names of at least {wanted.least} node(s), and --hosts, "
            f"--hostfile or the batch allocation give {there}"
        )
    return named


def spare_nodes(
    named: Sequence[str], numbers: tuple[int, int | None], wanted: int | NodeRange | None, spec: JobSpec
) -> SpareNodes | None:
    ranks, nnodes = numbers
    if not named or nnodes is None:
        return None

    def answers(name: str) -> bool:
        """A process comes up there, by the launcher that starts the ranks."""
        limits: dict[str, Any] = {"start_timeout": _ANSWER_SECONDS, "timeout": 2 * _ANSWER_SECONDS}
        how: dict[str, Any] = {name: getattr(spec, name) for name in ("map_by", "mpi_args", "env", "grace", "launcher")}
        nowhere: dict[str, Any] = {"out": io.StringIO(), "err": io.StringIO()}
        return run_job(JobSpec(["true"], nproc=1, hosts=f"{name}:1", **how, **limits, **nowhere)).returncode == 0

    least, most = (wanted.least, wanted.most) if isinstance(wanted, NodeRange) else (nnodes, nnodes)
    return SpareNodes(named, ranks, least, most, answers)
