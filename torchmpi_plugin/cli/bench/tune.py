"""``mpiplus bench --tune``: MPI's collectives against mpiplus's between nodes, and the file that says which to take."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import torch.distributed as dist

from ... import settings
from ...communicator.choice import KINDS
from ...communicator.tuning import Tuning
from ...options import Options
from .results import Row
from .sizes import format_size

#: What is measured, of those that mpiplus has collectives of its own for.
OPERATIONS = tuple(KINDS)
CONTESTANTS = ("own", "mpi")


def why_not(nodes: Sequence[str]) -> str:
    """Return why there is nothing to compare; empty if there is something."""
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
    groups = {name: dist.new_group(pg_options=Options(collectives=name)) for name in CONTESTANTS}
    if not groups["own"].communicator.shares_memory:
        raise click.ClickException("--tune: mpiplus's collectives need shared memory, and a node's /dev/shm is full")
    return groups


def choose(rows: Sequence[Row], nodes: Sequence[str], mpi: tuple[str, Sequence[int]]) -> Tuning:
    """Say up to which size of each operation mpiplus's collectives are to be taken."""
    measured = [row for row in rows if all(name in row.us for name in CONTESTANTS)]
    ratio = statistics.geometric_mean(row.us["own"] / row.us["mpi"] for row in measured)
    return Tuning(
        own_up_to={
            operation: _longest_own([row for row in measured if row.operation == operation])
            for operation in OPERATIONS
            if any(row.operation == operation for row in measured)
        },
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
                **{name: round(row.us[name], 2) for name in CONTESTANTS},
            }
            for row in measured
        ],
    )


def _bytes_of_sums(row: Row) -> int:
    """Sums of 16-bit floats cross the wire as float32, and C counts them so."""
    return row.size * (2 if row.dtype in ("bfloat16", "float16") else 1)


def _longest_own(rows: Sequence[Row]) -> int | None:
    """The bytes up to which mpiplus's collective is taken, so that the product of all rows' times is least; None: all.

    Of several sizes the largest: MPI's call comes after the comparison of the calls, with which short data is sent, so
    what is about equal is better sent with it.
    """
    best, least = 0, math.inf
    for longest in (0, *sorted({_bytes_of_sums(row) for row in rows})):
        time = sum(math.log(row.us["own" if _bytes_of_sums(row) <= longest else "mpi"]) for row in rows)
        if time <= least:
            best, least = longest, time
    return None if best == max(map(_bytes_of_sums, rows)) else best


def in_words(tuning: Tuning, path: Path) -> str:
    """Return what was found, and how to go by it."""
    found = []
    for operation, longest in tuning.own_up_to.items():
        whose = "own" if longest is None else f"own up to {format_size(longest)}, then MPI's" if longest else "MPI's"
        found.append(f"{operation} {whose}")
    return (
        f"collectives between nodes, as they were faster: {'; '.join(found)}. Own ones take {tuning.ratio:.2f} of the "
        f"time of MPI's, as the geometric mean over the table. For jobs on {tuning.hosts} nodes: "
        f"{settings.TUNING.name}={path.absolute()}"
    )
