"""Memory of a group of all ranks, and whether there is as much: as a communicator would find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import settings
from ...communicator import footprint, tuning
from ...communicator.choice import choose
from ...communicator.config import GroupConfig, group_config
from ...mpi import library as mpi_library
from ...node import node
from . import machine


def own_report() -> dict[str, Any]:
    """Return what rank 0 has to know of this rank."""
    try:
        wanted, problem = group_config(None, None)._asdict(), ""
    except ValueError as error:
        wanted, problem = {}, str(error)
    here = machine.shared_memory()
    return {"config": wanted, "problem": problem, "free_bytes": here["free_bytes"] if here["usable"] else 0}


def cost(module: Any, reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The cost of a group of all ranks.

    Args:
        module: ``mpi4py.MPI``.
        reports: by rank, of all of them; each has the ``host``, the ``node``, and what :func:`own_report` tells.

    Returns:
        The ``path`` of its collectives, its ``selection``, and by node bytes: of the segment, and what is free for it;
        of each rank's own, at once and later. Or the ``problem`` for which there can be no group.
    """
    in_order = [reports[rank] for rank in sorted(reports)]
    if problems := [report["problem"] for report in in_order if report["problem"]]:
        return {"problem": problems[0]}
    places = node.places([report["node"] for report in in_order])
    firsts = [report for report, place in zip(in_order, places, strict=True) if not place.local_rank]
    wanted = GroupConfig(**in_order[0]["config"])
    limits, file = None, settings.TUNING.value()
    if file and wanted.collectives == "auto":
        try:
            limits = tuning.limits(file, len(firsts), module.get_vendor()[0])
        except ValueError as error:
            return {"problem": str(error)}
    choice = choose(wanted.collectives, len(firsts), limits)
    nodes = []
    if choice.own:
        shim = mpi_library.import_shim(module)
        costs = footprint.of_layout(shim.lib, shim.ffi, places, wanted.reproducible, choice)
        for first, found in zip(firsts, costs, strict=True):
            sizes = {"segment_bytes": found.segment, "rank_bytes": found.own, "rank_bytes_later": found.later}
            nodes.append({"host": first["host"], "free_bytes": first["free_bytes"], **sizes})
    selection = choice.table(len(firsts), len(places))
    return {"path": choice.describe(len(firsts)), "selection": selection, "nodes": nodes}
