"""`mpiplus status` tells of ranks on other nodes too, and goes on without a node that is cut off."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_installations import Installation
from network import Hosts, following, launch, wait_for

SCRIPT = Path(__file__).parents[1] / "jobs/scripts/asked.py"
RANKS = 4


@pytest.mark.slow
def test_ranks_on_another_node(two_hosts: Hosts, installation: Installation, tmp_path: Path) -> None:
    """The pretended nodes share their files, and must not share their sockets."""
    command = ["sh", "-c", f'MPIPLUS_STATUS_DIRECTORY={tmp_path}/$(hostname) exec "$@"', "sh"]
    command += [sys.executable, str(SCRIPT), "holds_the_gil"]
    words = launch(two_hosts, installation.mpiexec, installation.vendor, 2, command)
    environment = installation.full_environment()
    with following(words, environment, tmp_path) as job:
        try:
            wait_for([tmp_path / f"ready-{rank}" for rank in range(RANKS)], 150, tmp_path / "output", job)
            time.sleep(2)
            told = json.loads(ask(two_hosts, installation, tmp_path, "--json"))
            assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2, 3]
            assert [rank["answer"]["host"] for rank in told["ranks"]] == ["node1", "node1", "node2", "node2"], told
            assert any(line.startswith("rank 1 is behind") for line in told["attention"]), told["attention"]
            seen_from_the_other_node(two_hosts, installation, tmp_path)
            two_hosts.cut("node2")
            told = json.loads(ask(two_hosts, installation, tmp_path, "--json"))
            silent = [line for line in told["attention"] if "on another node, which may be cut off" in line]
            assert len(silent) == 2, told["attention"]
        finally:
            for file in tmp_path.glob("node?/*.sock"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.name.split(".")[2]), signal.SIGKILL)


def seen_from_the_other_node(made: Hosts, installation: Installation, directory: Path) -> None:
    """Rank 1 holds its Python's lock: its neighbour speaks for it. It cannot write a trace."""
    told = json.loads(ask(made, installation, directory, "--json", node="node2"))
    assert [rank["answer"]["host"] for rank in told["ranks"]] == ["node1", "node1", "node2", "node2"], told
    stacks = of_ranks(ask(made, installation, directory, "--stacks", node="node2"))
    assert [re.findall(r"asked\.py\", line \d+ in (\w+)", stacks[rank])[0] for rank in range(RANKS)] == [
        *("main", "holds_the_gil", "main", "main")
    ], stacks
    assert list(of_ranks(ask(made, installation, directory, "--stacks", "1", node="node2"))) == [1]
    traces = of_ranks(ask(made, installation, directory, "--dump", node="node2"))
    assert [Path(traces[rank].strip()).exists() for rank in (0, 2, 3)] == [True] * 3, traces
    assert "does not answer" in traces[1]


def of_ranks(printed: str) -> dict[int, str]:
    """What follows the line of each rank."""
    parts = re.split(r"(?m)^rank (\d+).*:\n", printed)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


def ask(made: Hosts, installation: Installation, directory: Path, *words: str, node: str = "node1") -> str:
    mpiplus = str(Path(sys.executable).with_name("mpiplus"))
    environment = {**installation.full_environment(), "MPIPLUS_STATUS_DIRECTORY": str(directory / node)}
    command = made.on(node, [mpiplus, "status", *words])
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr + (directory / "output").read_text()
    return done.stdout
