"""What is told where the ranks of a group were asked for different things."""

from __future__ import annotations

from torchmpi_plugin.communicator.choice import GroupConfig, disagreement


def test_ranks_that_agree() -> None:
    assert disagreement([GroupConfig("auto", False)] * 4) == ""


def test_ranks_that_do_not() -> None:
    told = disagreement([GroupConfig("auto", False)] * 2 + [GroupConfig("mpi", False, False), GroupConfig("own", True)])
    assert "ranks 0, 1: auto collectives; rank 2: mpi collectives, no shared memory; " in told
    assert "rank 3: own collectives, reproducible sums)" in told
