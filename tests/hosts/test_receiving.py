"""What long operations between nodes cost their receivers in memory, whatever those do meanwhile."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mpi_installations import Installation, run_limited

ON_NODES = Path(__file__).with_name("on_nodes.py")
SCRIPT = Path(__file__).parent / "scripts/receiving.py"
COLLECTIVES, RANKS, MOST_MIB = 10, 3, 16


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["idle", "computing", "aborted", "given-up"])
def test_memory_beside_the_tensors(nodes_can_be_made, installation: Installation, how: str) -> None:
    """What nobody has received yet stays with its sender, whose operation ends, or fails at its deadline."""
    nodes = ["--nodes", str(RANKS), "--mpiexec", installation.mpiexec]
    command = [sys.executable, str(ON_NODES), *nodes, sys.executable, str(SCRIPT), how, "64"]
    _, output = run_limited(command, installation.full_environment(), 280)
    lines = re.findall(r"^(\w.*) on rank (\d): (-?\d+) MiB, (.*)$", output, re.MULTILINE)
    assert len(lines) == COLLECTIVES * RANKS, output
    assert len(re.findall("^end of rank", output, re.MULTILINE)) == RANKS, output
    assert not [line for line in lines if int(line[2]) > MOST_MIB], lines
    left = how in ("aborted", "given-up")
    for name, rank, _, end in lines:
        expected = "left" if left and rank == "0" else rf"done|.* timed out on rank {rank} " if left else "done"
        assert re.match(expected, end), (name, rank, end)
