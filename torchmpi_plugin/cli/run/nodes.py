"""Nodes of ``mpiplus run``: those to choose from, and files that the ranks have left on them.

A job that was killed cannot collect its ranks' files of calls. On each node that shares no directory with this one a
process, started as the ranks were, then says them on its stdout, and removes them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from ...jobs.job import SpareNodes, run_job
from ...jobs.spec import JobSpec
from ...launchers.layout import allocated_nodes, named_nodes
from ...names import counted
from ...node.processes import python_command
from ...timeline import rows
from .options import NodeRange

_ANSWER_SECONDS = 20.0  # for a node that may be lost to start something
_FETCH_SECONDS = 60.0
_TELL = "from torchmpi_plugin.cli.run.nodes import tell; tell()"
_MARK, _PIECE = "mpiplus-timeline", 32_000
_NAME = re.compile(r"[\w-]+\.\d+\.json")


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
            f"--nnodes {wanted.least}:{wanted.most} needs the names of at least {counted(wanted.least, 'node')}, and "
            f"--hosts, --hostfile or the batch allocation give {there}"
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
        limits = {"start_timeout": _ANSWER_SECONDS, "timeout": 2 * _ANSWER_SECONDS}
        alone = {"nproc": 1, "nnodes": None, "hosts": f"{name}:1", "hostfile": None}
        return run_job(spec.beside(["true"], **alone, **limits)).returncode == 0

    least, most = (wanted.least, wanted.most) if isinstance(wanted, NodeRange) else (nnodes, nnodes)
    return SpareNodes(named, ranks, least, most, answers)


def fetch(spec: JobSpec, directory: Path) -> None:
    """Get what is on the job's nodes and not here, and remove it there."""
    jobs = rows.jobs_in(directory)
    is_whole = bool(jobs) and len(list(jobs.values())[-1]) == spec.layout.ranks
    if spec.layout.one_node or (is_whole and not spec.max_restarts):
        return
    known = [path.name for paths in jobs.values() for path in paths]
    with tempfile.TemporaryFile("w+") as said:
        run_job(spec.beside(python_command(_TELL, str(directory), *known), timeout=_FETCH_SECONDS, out=said))
        said.seek(0)
        hear(said, directory)


def tell() -> None:
    """Say the files of a directory, given as the first argument, but for those of ranks whose text is in the others."""
    directory, *known = sys.argv[1:]
    for text in Path(directory).glob("*.*.json"):
        taken = text.with_suffix(".taken")
        with contextlib.suppress(OSError):  # another process of this node was first
            if text.name not in known:
                time = text.stat().st_mtime_ns
                words = base64.b64encode(rows.pack(text.rename(taken))).decode()
                for at in range(0, len(words), _PIECE):
                    print(_MARK, text.name, time, words[at : at + _PIECE])
                rows.remove(taken)


def hear(lines: Iterable[str], directory: Path) -> None:
    """Write the files that such processes have said."""
    pieces: dict[tuple[str, int], str] = {}
    for line in lines:
        mark, _, rest = line.partition(" ")
        if mark == _MARK and len(words := rest.split()) == 3 and _NAME.fullmatch(words[0]):
            key = words[0], int(words[1])
            pieces[key] = pieces.get(key, "") + words[2]
    for (name, time), said in pieces.items():
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / name
        rows.unpack(base64.b64decode(said), path)
        os.utime(path, ns=(time, time))
