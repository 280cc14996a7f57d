"""New groups of all ranks whose data goes different ways, whatever the environment asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from groups import Group

from torchmpi_plugin import Options
from torchmpi_plugin.communicator import choice
from torchmpi_plugin.node import node

#: By shared memory; as if the ranks were on two nodes in turn. Calls have an order among each other.
ORDERED = ("one node", "two nodes")
#: As if each rank was on a node of its own.
A_NODE_EACH = "a node each"
#: And by MPI's own collectives; and as on so many nodes that what is not short is MPI's.
PLACEMENTS = (*ORDERED, "MPI", "many nodes")
Placed = Callable[[str], Group]


@pytest.fixture
def placed(world: Group, new_group: Callable, monkeypatch: pytest.MonkeyPatch) -> Placed:
    """Makes a group of all ranks that is placed so."""

    def make(placement: str) -> Group:
        monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only" if placement == "MPI" else "auto")
        if placement != "MPI":
            host = {"one node": 0, A_NODE_EACH: world.rank}.get(placement, world.rank % 2)
            monkeypatch.setattr(node, "identity", lambda: f"node {host}")
            monkeypatch.setattr(choice, "MOST_NODES", 1 if placement == "many nodes" else 2)
        is_own = placement in (*ORDERED, A_NODE_EACH)
        group = new_group(None, pg_options=Options(collectives="own" if is_own else "auto"))
        assert group.communicator.choice.own == (placement != "MPI")
        is_mixed = placement == "many nodes" and group.size() > 1
        assert group.communicator.choice.own_for_all == (placement != "MPI" and not is_mixed)
        return Group(placement, group, world.ranks, world.rank)

    return make
