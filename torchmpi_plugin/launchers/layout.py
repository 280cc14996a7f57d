"""The nodes that a job runs on, and the number of ranks on each: as the user, or the batch system, says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..names import counted
from ..node import node
from .table import BATCH_SYSTEMS


class Node(NamedTuple):
    """A node, and how many ranks it may have; None where the user does not say."""

    name: str
    slots: int | None


class Layout(NamedTuple):
    """Numbers of ranks by node."""

    ranks: int  # all of them
    per_node: int | None  # how many on each node, if the user wants a certain number
    node_count: int | None  # how many nodes, if the user wants a certain number
    #: with the ranks of each; none: mpirun's choice, from the batch system's allocation or this node alone
    nodes: Sequence[tuple[str, int]]
    one_node: bool  # all ranks share one node
    here: bool  # and that node is this one


def parse_nodes(text: str) -> list[Node]:
    """Split ``h1:2,h2:2`` or ``h1,h2``; a ValueError for an empty name, or a number of ranks that is none."""
    named = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "")
        if not name or (colon and not (slots.isdigit() and int(slots))):
            raise ValueError(f"{part.strip()!r} is no node; nodes look like h1,h2 or h1:4,h2:4")
        named.append(Node(name, int(slots) if colon else None))
    return named


def read_hostfile(path: str | os.PathLike[str]) -> list[Node]:
    """Read a hostfile: Open MPI's ``h1 slots=2``, MPICH's ``h1:2``, or a name per line, repeated or not.

    Raises:
        ValueError: no such file, or no node in it.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"the hostfile {str(path)!r} cannot be read: {error}") from None
    named = []
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        each = parse_nodes(words[0])[0]
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        named.append(Node(each.name, int(slots[0])) if slots and slots[0].isdigit() else each)
    if not named:
        raise ValueError(f"the hostfile {str(path)!r} names no node")
    names = [each.name for each in named]
    if len(set(names)) == len(names):
        return named
    return [Node(name, names.count(name)) for name in dict.fromkeys(names)]  # PBS: a line per rank


def named_nodes(hosts: str | None, hostfile: str | os.PathLike[str] | None) -> list[Node]:
    """The nodes that the user names, by option or hostfile; none: left to others. A ValueError: they cannot be read."""
    return parse_nodes(hosts) if hosts else read_hostfile(hostfile) if hostfile else []


def _listed(variable: str, environment: Mapping[str, str]) -> list[str]:
    """The words in a file that a variable names."""
    try:
        return Path(environment[variable]).read_text().split()
    except (KeyError, OSError):
        return []


def allocated_ranks(environment: Mapping[str, str]) -> int | None:
    """Find out how many ranks the allocation is for, where it says."""
    told = (environment.get(batch.ranks, "") for batch in BATCH_SYSTEMS)
    lines = (len(_listed(batch.nodes, environment)) for batch in BATCH_SYSTEMS if batch.has_line_per_rank)
    return next((int(number) for number in told if number.isdigit()), None) or next(filter(None, lines), None)


def allocated_nodes(environment: Mapping[str, str]) -> list[str]:
    """Find the names of the allocation's nodes; none where it does not tell."""
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            return subprocess.run(command, check=True, capture_output=True, timeout=20).stdout.decode().split()
        except (OSError, subprocess.SubprocessError):
            return []
    lists = (_listed(batch.nodes, environment) for batch in BATCH_SYSTEMS)
    return next((list(dict.fromkeys(names)) for names in lists if names), [])


def lay_out(
    nproc: int,
    nnodes: int | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Layout:
    """Decide how many ranks go where; a ValueError where the numbers do not go together."""
    if hosts and hostfile:
        raise ValueError("give the nodes on the command line or in a hostfile, not both")
    named = named_nodes(hosts, hostfile)
    ranks = nproc * (nnodes or 1)
    is_allocation = any(environment.get(batch.mark) for batch in BATCH_SYSTEMS)
    if named:
        spread = _spread(named, nproc, nnodes)
        here = len(spread) == 1 and node.is_local(spread[0][0])
        return Layout(ranks, nproc if nnodes else None, nnodes, spread, len(spread) == 1, here)
    if nnodes and nnodes > 1 and not is_allocation:
        raise ValueError(f"{nnodes} nodes, but which? Name them (--hosts h1,h2), or run inside a batch allocation")
    one_node = not is_allocation or environment.get("SLURM_JOB_NUM_NODES") == "1" or nnodes == 1
    return Layout(ranks, nproc if nnodes else None, nnodes, (), one_node, not is_allocation)


def _spread(named: Sequence[Node], nproc: int, nnodes: int | None) -> list[tuple[str, int]]:
    """The ranks of each node, the first ones filled first."""
    if nnodes is not None:
        if nnodes > len(named):
            raise ValueError(f"{nnodes} nodes, but only {counted(len(named), 'node')} named")
        return [(each.name, nproc) for each in named[:nnodes]]
    even = -(-nproc // len(named))
    left = nproc
    spread = []
    for each in named:
        share = min(left, even if each.slots is None else each.slots)
        if share:
            spread.append((each.name, share))
        left -= share
    if left:
        raise ValueError(f"{nproc} ranks do not fit: the nodes named have room for {nproc - left}")
    return spread
