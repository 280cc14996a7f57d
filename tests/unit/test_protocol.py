"""Builds of mpiplus that do not understand each other are told apart, by what any build says of itself."""

from __future__ import annotations

from torchmpi_plugin import protocol
from torchmpi_plugin.communicator import membership
from torchmpi_plugin.protocol import PROTOCOL, Build


def test_one_build() -> None:
    assert protocol.disagreement([protocol.this("a"), protocol.this("b")]) == ""


def test_another_version_with_the_same_protocol() -> None:
    assert protocol.disagreement([Build(PROTOCOL, "0.2.0", "a"), Build(PROTOCOL, "0.2.1", "b")]) == ""


def test_both_are_named_with_their_nodes() -> None:
    builds = [Build(1, "0.2.0", "node1"), Build(2, "0.3.0", "node2"), Build(1, "0.2.0", "node3")]
    text = protocol.disagreement(builds)
    assert "mpiplus 0.2.0 (protocol 1) on node1, node3 (ranks 0, 2)" in text
    assert "mpiplus 0.3.0 (protocol 2) on node2 (rank 1)" in text
    assert "Install the same one on all nodes" in text


def test_a_build_that_says_nothing() -> None:
    """As those from before the number."""
    old = membership._build(["3", "0123456789abcdef"])
    assert "a protocol without number" in protocol.disagreement([protocol.this("here"), old])


def test_a_later_build_may_say_more() -> None:
    assert membership._build(["0", "mark", '[7, "9.9", "there", "and more"]']) == Build(7, "9.9", "there")
