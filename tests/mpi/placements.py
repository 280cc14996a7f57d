"""New groups of all ranks whose data goes different ways, whatever the environment asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmpi_plugin import Options
from torchmpi_plugin.node import node

#: By shared memory; by MPI's own collectives; and as if the ranks were on two nodes in turn.
PLACEMENTS = ("one node", "MPI", "two nodes")


def group_placed(placement: str, rank: int, new_group: Callable[..., Any], monkeypatch: Any) -> Any:
    """Through the fixtures of a test."""
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only" if placement == "MPI" else "auto")
    if placement != "MPI":
        host = rank % 2 if placement == "two nodes" else 0
        monkeypatch.setattr(node, "identity", lambda: f"node {host}")
    group = new_group(None, pg_options=Options(collectives=None if placement == "MPI" else "own"))
    assert group._communicator.shares_memory == (placement != "MPI")
    return group
