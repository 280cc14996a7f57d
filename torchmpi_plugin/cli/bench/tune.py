"""``mpiplus bench --tune``: both ways of each row of the table of selection, and the file that says which to take."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from ... import settings
from ...communicator import choice, cuda_path
from ...communicator.choice import BETWEEN_NODES, SELECTION
from ...communicator.tuning import Tuning, read
from ...mpi import runtime
from ...names import counted
from ...options import Options
from .device import Device
from .results import Row


def table(nodes: Sequence[str], device: str = "cpu") -> dict[str, choice.Row]:
    """Return the rows to measure with tensors there, in a group that has its ranks on these nodes.

    Of CUDA tensors not before the world is made, which has one path for them.
    """
    where = choice.BETWEEN_NODES if len(set(nodes)) > 1 else choice.ON_A_NODE
    if device != "cpu":
        ways = {"direct": choice.CUDA, "ipc": choice.CUDA_ON_A_NODE, "staged": choice.CUDA_IN_SLOTS}
        where = ways[cuda_path.current.name]
    rows = {name: row for name, row in SELECTION.items() if row.where == where and row.counts(len(set(nodes)))}
    return {name: row for name, row in rows.items() if len(nodes) >= row.ranks}


def contestants(rows: dict[str, choice.Row]) -> tuple[str, str]:
    """Return the two ways, which are the same in all those rows."""
    row = next(iter(rows.values()))
    return row.short, row.long


def why_not(nodes: Sequence[str], device: str) -> str:
    """Return why there is nothing to compare; empty if there is something."""
    if device == "cpu" and not table(nodes):
        return (
            "--tune compares collectives between nodes, or of three and more ranks on one: start it on those that it "
            "is for, as in mpirun --host node1:2,node2:2 -n 4 mpiplus bench --tune"
        )
    if variable := settings.unshared():
        return f"--tune compares with mpiplus's own collectives, which {variable} forbids: unset it"
    return ""


def new_groups(device: Device) -> dict[str, dist.ProcessGroup]:
    """Make a group of all ranks for each of the two ways, by a tuning file that knows no other.

    Raises:
        click.ClickException: mpiplus has no shared memory on a node, so both would be MPI's, or tensors of that device
            go one way only.
    """
    dist.init_process_group("mpiplus", init_method="mpi://", pg_options=Options(collectives="mpi"))
    world: Any = dist.group.WORLD
    nodes = [str(world.communicator.node_of(rank)) for rank in range(world.size())]
    rows = table(nodes, device.kind)
    if not rows:
        raise click.ClickException(
            f"--tune --device {device.kind} compares on one node, and of two and more ranks, unless MPI gets CUDA "
            f"tensors ({cuda_path.current.why})"
        )
    groups = by_way(rows, nodes)
    if not all(group.communicator.choice.own for group in groups.values()):
        raise click.ClickException("--tune: mpiplus's collectives need shared memory, and a node's /dev/shm is full")
    return groups


def by_way(rows: dict[str, choice.Row], nodes: Sequence[str]) -> dict[str, Any]:
    """Return a group of all ranks for each of the two ways of the rows."""
    groups = {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "tuning.json")
        os.environ[settings.TUNING.name] = str(file)
        for way, limit in zip(contestants(rows), (None, 0), strict=True):
            file.write_text(_tuning(dict.fromkeys(rows, limit), nodes, runtime.mpi().get_vendor(), 1.0, []).text())
            groups[way] = dist.new_group(backend="mpiplus", pg_options=Options(collectives="auto"))
    del os.environ[settings.TUNING.name]  # no other group is made
    return groups


def _tuning(
    limits: dict[str, int | None],
    nodes: Sequence[str],
    mpi: tuple[str, Sequence[int]],
    ratio: float,
    medians_us: Sequence[dict[str, Any]],
) -> Tuning:
    version = ".".join(map(str, mpi[1]))
    return Tuning(limits, len(set(nodes)), list(Counter(nodes).values()), mpi[0], version, ratio, medians_us)


def choose(rows: Sequence[Row], nodes: Sequence[str], mpi: tuple[str, Sequence[int]], device: str = "cpu") -> Tuning:
    """Say up to which size of each operation the first way is to be taken."""
    selection = table(nodes, device)
    ways = contestants(selection)
    measured = [row for row in rows if all(way in row.us for way in ways)]
    limits = {
        name: _longest_short([row for row in measured if row.operation == selected.operation], selected)
        for name, selected in selection.items()
        if any(row.operation == selected.operation for row in measured)
    }
    ratio = statistics.geometric_mean(row.us[ways[0]] / row.us[ways[1]] for row in measured)
    medians_us = [
        {"operation": row.operation, "dtype": row.dtype, "bytes": row.size}
        | {way: round(row.us[way], 2) for way in ways}
        for row in measured
    ]
    return _tuning(limits, nodes, mpi, round(ratio, 3), medians_us)


def keeping(tuning: Tuning, path: Path) -> Tuning:
    """Return it with the limits of other rows that the file has for such jobs, as of tensors that are elsewhere."""
    try:
        before = read(path)
    except ValueError:
        return tuning
    if (before.hosts, before.mpi) != (tuning.hosts, tuning.mpi):
        return tuning
    return replace(tuning, limits={**before.limits, **tuning.limits})


def _bytes_counted(row: Row, way: choice.Row) -> int:
    """Between nodes sums of 16-bit floats cross the wire as float32, and C counts them so."""
    return row.size * (2 if way.where == BETWEEN_NODES and row.dtype in ("bfloat16", "float16") else 1)


def _longest_short(rows: Sequence[Row], way: choice.Row) -> int | None:
    """The bytes up to which the first way is taken, so that the product of all rows' times is least; None: all.

    Of several sizes the largest: MPI's call comes after the comparison of the calls, with which short data is sent, so
    what is about equal is better sent with it.
    """
    best, least = 0, math.inf
    for longest in (0, *sorted({_bytes_counted(row, way) for row in rows})):
        time = sum(math.log(row.us[way.short if _bytes_counted(row, way) <= longest else way.long]) for row in rows)
        if time <= least:
            best, least = longest, time
    return None if best == max(_bytes_counted(row, way) for row in rows) else best


def in_words(tuning: Tuning, path: Path) -> str:
    """Return what was found, and how to go by it."""
    found = [(SELECTION[name], f"{name} {SELECTION[name].describe(limit)}") for name, limit in tuning.limits.items()]
    row, _ = found[0]
    return (
        f"what was faster {row.where}: {'; '.join(words for _, words in found)}. {row.short} takes {tuning.ratio:.2f} "
        f"of the time of {row.long}, as the geometric mean over the table. For jobs on "
        f"{counted(tuning.hosts, 'node')}: {settings.TUNING.name}={path.absolute()}"
    )
