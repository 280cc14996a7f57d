"""Times of the algorithms that MPI libraries have for collectives between nodes, by the LogGP model of ``loggp.py``.

The algorithms and their costs: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; scatter and all-gather for a broadcast: van de Geijn, 1994. All in their best form: nothing crosses to
another node that need not, no time for what ranks of a node do among themselves, or for sums, and of all algorithms the
fastest is taken, which a library's tables may not do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from loggp import Network

SEGMENT = 128 << 10  # bytes of a chain's messages, as Open MPI's


class Nodes(NamedTuple):
    """Nodes with so many ranks each."""

    count: int
    ranks: int

    @property
    def levels(self) -> int:
        """Messages one after the other in a tree of all nodes."""
        return (self.count - 1).bit_length()

    @property
    def others(self) -> int:
        """Ranks on other nodes."""
        return (self.count - 1) * self.ranks


def _steps(network: Network, steps: float, nbytes: float) -> float:
    """So many messages one after the other, in which a node sends so many bytes in all."""
    return steps * network.message + nbytes * network.per_byte


def _chain(network: Network, nodes: Nodes, nbytes: int) -> float:
    """Each node passes the segments on to the next one."""
    segments = math.ceil(nbytes / SEGMENT)
    each = max(network.between, min(nbytes, SEGMENT) * network.per_byte)
    return _steps(network, nodes.count - 1, (nodes.count - 1) * min(nbytes, SEGMENT)) + (segments - 1) * each


def _trees(network: Network, nodes: Nodes, nbytes: int) -> dict[str, float]:
    return {"a tree": _steps(network, nodes.levels, nodes.levels * nbytes)}


def _broadcast(network: Network, nodes: Nodes, nbytes: int) -> dict[str, float]:
    twice = 2 * nbytes * (nodes.count - 1) / nodes.count
    return {
        **_trees(network, nodes, nbytes),
        "scatter and all-gather": _steps(network, nodes.levels + nodes.count - 1, twice),
        "a chain": _chain(network, nodes, nbytes),
    }


def _sum(network: Network, nodes: Nodes, nbytes: int) -> dict[str, float]:
    twice = 2 * nbytes * (nodes.count - 1) / nodes.count
    return {**_trees(network, nodes, nbytes), "by halves": _steps(network, 2 * nodes.levels, twice)}


def _blocks(algorithm: str) -> Callable[[Network, Nodes, int], dict[str, float]]:
    """As many steps as levels, in which a node, or the root's, sends a block for every rank of the others."""
    return lambda network, nodes, nbytes: {algorithm: _steps(network, nodes.levels, nodes.others * nbytes)}


def _all_to_all(network: Network, nodes: Nodes, nbytes: int) -> dict[str, float]:
    ranks = nodes.count * nodes.ranks
    levels = (ranks - 1).bit_length()
    in_pairs = max(nodes.others * network.between, nodes.ranks * nodes.others * nbytes * network.per_byte)
    return {
        "Bruck's": _steps(network, levels, levels * nodes.ranks * ranks / 2 * nbytes),
        "in pairs": _steps(network, 1, 0) + in_pairs,
    }


_ALGORITHMS: dict[str, Callable[[Network, Nodes, int], dict[str, float]]] = {
    "barrier": _trees,
    "broadcast": _broadcast,
    "all_reduce": _sum,
    "reduce": _sum,
    "all_gather": _blocks("by doubling"),
    "reduce_scatter": _blocks("by halves"),
    "all_to_all": _all_to_all,
    "gather": _blocks("a tree"),
    "scatter": _blocks("a tree"),
}


def fastest(network: Network, nodes: Nodes, operation: str, nbytes: int) -> tuple[float, str]:
    """Microseconds, and the algorithm that takes so long.

    Args:
        nbytes: of the tensor; of one block in all_gather, reduce_scatter, all_to_all, gather and scatter.
    """
    found = _ALGORITHMS[operation](network, nodes, nbytes)
    name = min(found, key=lambda name: found[name])
    return found[name], name
