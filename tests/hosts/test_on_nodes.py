"""on_nodes.py: a command on pretended nodes, with a network as slow as asked for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mpi_installations import Installation, run_limited

ON_NODES = Path(__file__).with_name("on_nodes.py")


def test_nodes(nodes_can_be_made, installation: Installation) -> None:
    """Every node has its ranks and the rate; and is removed."""
    options = ["--nodes", "3", "--ranks", "2", "--mpiexec", installation.mpiexec, "--rate", "1gbit"]
    command = [sys.executable, str(ON_NODES), *options, "sh", "-c", "echo $(hostname) $(tc qdisc show dev eth0)"]
    code, output = run_limited(command, installation.full_environment(), 120)
    assert code == 0, output
    assert sorted(re.findall(r"(node\d) qdisc", output)) == ["node1"] * 2 + ["node2"] * 2 + ["node3"] * 2, output
    assert output.count("tbf") == output.count("rate 1Gbit") == 6, output
