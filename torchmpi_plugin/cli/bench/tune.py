"""``mpiplus bench --tune``: MPI's collectives against mpiplus's between nodes, and the file that says which won."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import torch.distributed as dist

from ... import settings
from ...communicator.tuning import CHOICES, Tuning
from ...operations import ROWS
from ...options import Options
from .results import Row

#: What is measured of those that mpiplus has collectives of its own for.
OPERATIONS = tuple(row.name for row in ROWS if row.bus and row.equal_counts)


def hindrance(nodes: Sequence[str]) -> str:
    """Why there is nothing to compare; empty if there is."""
    if len(set(nodes)) == 1:
        return (
            "--tune compares collectives between nodes, and all ranks are on one: start it on those that it is for, "
            "as in mpirun --host node1:2,node2:2 -n 4 mpiplus bench --tune"
        )
    if variable := settings.unshared():
        return f"--tune compares with mpiplus's own collectives, which {variable} forbids: unset it"
    return ""


def new_groups() -> dict[str, dist.ProcessGroup]:
    """Make a group of all ranks for each choice.

    Raises:
        click.ClickException: mpiplus has no shared memory on a node, so both would be MPI's.
    """
    dist.init_process_group("mpiplus", init_method="mpi://", pg_options=Options(collectives="mpi"))
    groups = {name: dist.new_group(pg_options=Options(collectives=name)) for name in CHOICES}
    if not groups["own"].communicator.shares_memory:
        raise click.ClickException("--tune: mpiplus's collectives need shared memory, and a node's /dev/shm is full")
    return groups


def choose(rows: Sequence[Row], nodes: Sequence[str], mpi: tuple[str, Sequence[int]]) -> Tuning:
    """Say which is faster: the one with the smaller times in the geometric mean, where each row counts alike.

    Args:
        rows: with the contestants "own" and "mpi".
        nodes: where each rank is.
        mpi: the MPI's vendor and version.
    """
    measured = [row for row in rows if all(name in row.us for name in CHOICES)]
    ratio = statistics.geometric_mean(row.us["own"] / row.us["mpi"] for row in measured)
    return Tuning(
        collectives="own" if ratio <= 1 else "mpi",
        hosts=len(set(nodes)),
        ranks_per_host=list(Counter(nodes).values()),
        mpi=mpi[0],
        mpi_version=".".join(map(str, mpi[1])),
        ratio=round(ratio, 3),
        medians_us=[
            {
                "operation": row.operation,
                "dtype": row.dtype,
                "bytes": row.size,
                **{name: round(row.us[name], 2) for name in CHOICES},
            }
            for row in measured
        ],
    )


def in_words(tuning: Tuning, path: Path) -> str:
    """Return what was found, and how to go by it."""
    return (
        f"collectives between nodes: {tuning.collectives!r} is faster; own ones take {tuning.ratio:.2f} of the time of "
        f"MPI's, as the geometric mean over the table. For jobs on {tuning.hosts} nodes: "
        f"{settings.TUNING.name}={path.absolute()}"
    )
