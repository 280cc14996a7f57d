"""`mpiplus run --max-restarts` where a node is lost: the job goes on, on those that answer."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from mpi_installations import Installation
from network import Hosts, following, launch, mpiplus_run, wait_for

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 4
#: Prints, so that there is data under way which nobody acknowledges once the cable is cut.
PROGRAM = (
    'touch "ready-$TORCHELASTIC_RESTART_COUNT-$RANK"; '
    "while [ $TORCHELASTIC_RESTART_COUNT = 0 ]; do sleep 0.2; echo on; done; hostname"
)


def gone_within(made: Hosts, name: str, seconds: float, program: str = "") -> None:
    """Nothing of the job, or of a program, is left on a node that is cut off, though nobody can tell it to end."""
    until, left = time.monotonic() + seconds, [["?"]]
    while left and time.monotonic() < until:
        time.sleep(0.5)
        space = made._space(name)
        listed = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True).stdout
        commands = []
        for pid in listed.split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        left = [command for command in commands if not program or command[1:2] == [program]]
    assert not left, left


@pytest.mark.slow
@pytest.mark.parametrize(("names", "left"), [("node2,node3,node1", "node2,node1"), ("node1,node3", "node1")])
def test_a_node_is_cut_off(
    three_hosts: Hosts, installation: Installation, tmp_path: Path, names: str, left: str
) -> None:
    """A spare one takes its place; where there is none the next attempt has fewer ranks."""
    options = ["--nproc-per-node", "1", "--nnodes", "1:2", "--hosts", names, "--max-restarts", "1", "--grace", "1"]
    words = mpiplus_run(three_hosts, installation.vendor, *options, "-c", "sh", "-c", PROGRAM)
    with following(words, installation.full_environment(), tmp_path) as job:
        wait_for([tmp_path / f"ready-0-{rank}" for rank in range(2)], 100, tmp_path / "output", job)
        three_hosts.cut("node3")
        assert job.wait(150) == 0, (tmp_path / "output").read_text()
        gone_within(three_hosts, "node3", 45)
    told = (tmp_path / "output").read_text()
    assert "node3 no longer answers and will be left out" in told
    assert sorted(re.findall(r"\[rank \d, restart 1\] (\w+)", told)) == sorted(left.split(","))


def started(
    made: Hosts, installation: Installation, tmp_path: Path, *words: str, launcher: str = "mpiplus run"
) -> AbstractContextManager[subprocess.Popen]:
    """cable.py on two nodes with two ranks each; it prints into a file."""
    program = [str(SCRIPTS / "cable.py"), str(tmp_path), *words]
    if launcher == "mpiexec":
        command = launch(made, installation.mpiexec, installation.vendor, 2, [sys.executable, *program])
    else:
        options = ["--nproc-per-node", "2", "--hosts", "node1,node2", "--grace", "1"]
        command = mpiplus_run(made, installation.vendor, *options, *program)
    environment = {**installation.full_environment(), "UCX_TLS": "tcp"}
    return following(command, environment, tmp_path)


def wait_for_ranks(job: subprocess.Popen, directory: Path) -> None:
    wait_for([directory / f"ready-{rank}" for rank in range(RANKS)], 150, directory / "output", job)


def cut_off_while_ranks_meet(made: Hosts, job: subprocess.Popen, directory: Path) -> None:
    wait_for_ranks(job, directory)
    time.sleep(3)
    made.cut("node2")
    (directory / "cut").touch()


@pytest.mark.slow
def test_a_node_is_cut_off_while_ranks_meet(two_hosts: Hosts, installation: Installation, tmp_path: Path) -> None:
    """The job ends by itself, soon after the deadline of init_process_group, and names the node or its ranks."""
    with started(two_hosts, installation, tmp_path, "meets") as job:
        cut_off_while_ranks_meet(two_hosts, job, tmp_path)
        assert job.wait(100) != 0
        gone_within(two_hosts, "node2", 60)
    assert re.search(r"node2|ranks 2, 3", (tmp_path / "output").read_text()), (tmp_path / "output").read_text()


@pytest.mark.slow
def test_ranks_end_that_meet_in_vain(two_hosts: Hosts, installation: Installation, tmp_path: Path) -> None:
    """Under MPI's own launcher all ranks end, and one says why; the launcher may wait for the node for ever."""
    with started(two_hosts, installation, tmp_path, "meets", launcher="mpiexec") as job:
        cut_off_while_ranks_meet(two_hosts, job, tmp_path)
        for node in ("node1", "node2"):
            gone_within(two_hosts, node, 60, str(SCRIPTS / "cable.py"))
    # Of node1's two ranks one at least: when it ends, the launcher may end the other one.
    assert "MPI_Init has not come back after 20 s" in (tmp_path / "output").read_text()


def test_a_job_that_goes_on(two_hosts: Hosts, installation: Installation, tmp_path: Path) -> None:
    """A cable that is out for 5 s delays it; nothing more."""
    with started(two_hosts, installation, tmp_path, "works") as job:
        wait_for_ranks(job, tmp_path)
        two_hosts.cut("node2")
        time.sleep(5)
        two_hosts.plug_in("node2")
        time.sleep(2)
        (tmp_path / "enough").touch()
        assert job.wait(100) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().count("at the end") == RANKS
