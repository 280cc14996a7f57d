"""The facts as one screen of text."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...communicator.shared_memory import in_words
from ...flavours import Library
from ...names import counted
from .machine import of_launcher

_WIDTH = 132
_SHOWN_NODES = 16
_KNOWN = {None: "not known", True: "yes", False: "no"}


def nodes_of(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The nodes of a job, each with its ranks, its cores and how ranks are bound to them."""
    by_node: dict[str, list[int]] = {}
    for rank in sorted(map(int, reports)):
        by_node.setdefault(reports[str(rank)]["node"], []).append(rank)
    nodes = []
    for ranks in by_node.values():
        about = [reports[str(rank)] for rank in ranks]
        cores = {core for report in about for core in report["cores"]}
        nodes.append(
            {
                "host": about[0]["host"],
                "ranks": ranks,
                "cores": len(cores),
                "cores_per_rank": min(len(report["cores"]) for report in about),
                "bound": any(len(report["cpus"]) < report["all"] for report in about),
            }
        )
    return nodes


def span(ranks: Sequence[int]) -> str:
    """``0-3, 6`` for 0, 1, 2, 3, 6."""
    parts = []
    for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        first, *others = [rank for _, rank in run]
        parts.append(f"{first}-{others[-1]}" if others else str(first))
    return ", ".join(parts)


def _mpi_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mpi = facts.get("mpi")
    if mpi is not None:
        yield "MPI library", mpi["text"]
        yield "", mpi["path"]
        yield "", f"MPI {mpi['standard']}, ABI {mpi['abi']}, {mpi['thread_level']}"
        cuda = mpi["cuda"]
        yield "CUDA-aware", f"{_KNOWN[cuda['aware']]}: {cuda['why']}"
        yield "CUDA tensors", f"{cuda['path']}: {cuda['path_why']}"
        if facts.get("cuda_on_node"):
            yield "", facts["cuda_on_node"]
    elif "library" in facts:
        library = Library(**facts["library"])
        yield "MPI library", library.headline
        yield "", f"{library.path}, not started"
    else:
        yield "MPI library", "none that works"
    if facts["started_by"]:
        yield "started by", facts["started_by"]
    launcher = facts.get("launcher")
    if launcher:
        yield "launcher", f"{launcher['path']} ({launcher['version']}) belongs to the library"
        for program, why in list(launcher["rejected"].items())[:4]:
            yield "", f"not {program}: it {why}"
    elif "launcher" in facts:
        yield "launcher", "none that belongs to the library"


def _node_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    here = facts["host"]
    threads = f"{here['hardware_threads']} of {here['hardware_threads_of_host']} hardware threads"
    yield "node", f"{here['name']}: this process may use {counted(here['cores'], 'core')}, {threads}"
    shared, cma = here["shared_memory"], here["cma"]
    if shared["usable"]:
        yield "/dev/shm", f"{shared['bytes'] / (1 << 30):.1f} GiB, {shared['free_bytes'] / (1 << 30):.1f} free"
    else:
        yield "/dev/shm", f"not usable: {shared['why']}"
    yield "CMA", f"{_KNOWN[cma['usable']]}: {cma['why']}"


def _job_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    nodes = facts.get("nodes", [])
    if facts.get("size", 1) == 1:
        return
    yield "job", f"{facts['size']} ranks on {counted(len(nodes), 'node')}"
    for place in nodes[:_SHOWN_NODES]:
        bound = f"bound, {counted(place['cores_per_rank'], 'core')} for a rank" if place["bound"] else "not bound"
        yield "", f"{place['host']}: ranks {span(place['ranks'])} on {counted(place['cores'], 'core')}, {bound}"
    if len(nodes) > _SHOWN_NODES:
        yield "", f"and {len(nodes) - _SHOWN_NODES} more"
    if "failed_pairs" in facts:
        pairs = facts["size"] * (facts["size"] - 1) // 2
        bad = len(facts["failed_pairs"])
        yield "talking", f"{bad} of {pairs} pairs of ranks cannot" if bad else "every pair of ranks can"


def _group_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    group = facts.get("group", {})
    if "path" not in group:
        return
    yield "a group of all", f"{group['path']}; each further group costs as much for its ranks"
    for place in group["nodes"][:_SHOWN_NODES]:
        segment, free = in_words(place["segment_bytes"]), in_words(place["free_bytes"])
        later = place["rank_bytes_later"]
        more = f", and {in_words(later)} more from the first long collective on" if later else ""
        own = f"{in_words(place['rank_bytes'])} for each rank{more}"
        yield "", f"{place['host']}: {segment} of /dev/shm ({free} free); {own}"
    if len(group["nodes"]) > _SHOWN_NODES:
        yield "", f"and {len(group['nodes']) - _SHOWN_NODES} more"
    for name, ways in group["selection"].items():
        yield "", f"{name}: {ways}"


def _variable_rows(facts: Mapping[str, Any], verbose: bool) -> Iterator[tuple[str, str]]:
    shown = {name: value for name, value in facts["variables"].items() if verbose or not of_launcher(name)}
    lines = [f"{name}={value}" for name, value in shown.items()]
    if left_out := len(facts["variables"]) - len(shown):
        lines.append(f"and {left_out} that the launcher has set for itself; --verbose shows them")
    yield from zip(["variables", *[""] * len(lines)], lines, strict=False)


def show(facts: Mapping[str, Any], verbose: bool = False) -> None:
    """Print everything; of the variables that a launcher sets for itself only the number, unless verbose."""
    # Some launchers give each rank a terminal of 80 columns of its own, whatever the output really goes to.
    own = sys.stdout.isatty() and not facts["started_by"]
    console = Console(width=None if own else _WIDTH, force_terminal=own, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts["versions"].items():
        table.add_row(name, Text(value))
    about = (_mpi_rows(facts), _node_rows(facts), _job_rows(facts), _group_rows(facts))
    for name, value in itertools.chain(*about, _variable_rows(facts, verbose)):
        table.add_row(name, Text(value))
    console.print("mpiplus info", table)
    for problem in facts["problems"]:
        style, mark = ("bold red", "PROBLEM") if problem["serious"] else ("yellow", "note")
        console.print(Text.assemble((f" {mark}: ", style), problem["text"]))
    if not facts["problems"]:
        console.print(" no problem found")
