"""The batch system's allocation: of which one, for how many ranks, on which nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from .table import BATCH_SYSTEMS


def allocation(environment: Mapping[str, str]) -> str:
    """Find the batch system whose allocation this is, or an empty text."""
    return next((batch.name for batch in BATCH_SYSTEMS if environment.get(batch.mark)), "")


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
