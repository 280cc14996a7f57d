"""Builds of mpiplus that do not understand each other, and ranks that want different things, are told apart."""

from __future__ import annotations

from torchmpi_plugin import protocol
from torchmpi_plugin.communicator import membership
from torchmpi_plugin.communicator.choice import GroupConfig, disagreement
from torchmpi_plugin.protocol import PROTOCOL, Build


def test_builds_that_understand_each_other() -> None:
    assert protocol.disagreement([protocol.this("a"), protocol.this("b")]) == ""
    assert protocol.disagreement([Build(PROTOCOL, "0.2.0", "a"), Build(PROTOCOL, "0.2.1", "b")]) == ""


def test_both_are_named_with_their_nodes() -> None:
    builds = [Build(1, "0.2.0", "node1"), Build(2, "0.3.0", "node2"), Build(1, "0.2.0", "node3")]
    text = protocol.disagreement(builds)
    assert "mpiplus 0.2.0 (protocol 1) on node1, node3 (ranks 0, 2)" in text
    assert "mpiplus 0.3.0 (protocol 2) on node2 (rank 1)" in text
    assert "Install the same one on all nodes" in text


def test_what_other_builds_say() -> None:
    """Nothing, as those from before the number, or more."""
    old = membership._build(["3", "0123456789abcdef"])
    assert "a protocol without number" in protocol.disagreement([protocol.this("here"), old])

    assert membership._build(["0", "mark", '[7, "9.9", "there", "and more"]']) == Build(7, "9.9", "there")


def test_ranks_that_were_asked_for_different_groups() -> None:
    assert disagreement([GroupConfig("auto", False)] * 4) == ""
    told = disagreement([GroupConfig("auto", False)] * 2 + [GroupConfig("mpi", False, False), GroupConfig("own", True)])
    assert "ranks 0, 1: auto collectives; rank 2: mpi collectives, no shared memory; " in told
    assert "rank 3: own collectives, reproducible sums)" in told
