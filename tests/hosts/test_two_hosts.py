"""Two nodes with two ranks each, over TCP."""

from __future__ import annotations

import re
from pathlib import Path

import fork_server
import pytest
import torch.distributed as dist
from mpi_installations import Installation, run_limited
from network import ONE_ON_EACH, Hosts, following, launch, mpiplus_run, wait_for
from rank_runs import rank_arguments, run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
SURVIVE = Path(__file__).parents[2] / "docs/examples/survive.py"
RANKS = 4


@pytest.fixture
def environment(installation: Installation) -> dict[str, str]:
    # MPICH's UCX would see one kernel and go through its memory.
    return {**installation.full_environment(), "UCX_TLS": "tcp"}


def on_both(made: Hosts, installation: Installation, arguments: list[str]) -> list[str]:
    return launch(made, installation.mpiexec, installation.vendor, 2, [fork_server.python(), *arguments])


def test_places(two_hosts: Hosts, installation: Installation, environment: dict[str, str]) -> None:
    """Rank, local rank and node rank agree with where the ranks are; all reach the store."""
    command = on_both(two_hosts, installation, [str(SCRIPTS / "places.py")])
    code, output = run_limited(command, environment, 120)
    assert code == 0, output
    places = sorted(re.findall(r"place: (.*)", output))
    assert places == [
        "rank 0 of 4 is local rank 0 of 2 on node 0, node1",
        "rank 1 of 4 is local rank 1 of 2 on node 0, node1",
        "rank 2 of 4 is local rank 0 of 2 on node 1, node2",
        "rank 3 of 4 is local rank 1 of 2 on node 1, node2",
    ]


def test_windows(two_hosts: Hosts, installation: Installation, environment: dict[str, str]) -> None:
    """Each rank maps the tensors on its own node (U), sends the others messages (S), and need not wait for either."""
    if not hasattr(dist, "_new_window"):
        pytest.skip("this torch has no windows: they come with 2.15")
    command = on_both(two_hosts, installation, [str(SCRIPTS / "windows.py")])
    code, output = run_limited(command, environment, 120)
    assert code == 0, output
    kinds = sorted(re.findall(r"window: (rank \d \w+)", output))
    assert kinds == ["rank 0 UUSS", "rank 1 UUSS", "rank 2 SSUU", "rank 3 SSUU"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_operation_table(
    two_hosts: Hosts, installation: Installation, environment: dict[str, str], tmp_path: Path
) -> None:
    """All operations and dtypes."""
    reports = tmp_path / "reports"
    reports.mkdir()
    command = on_both(two_hosts, installation, rank_arguments(reports, "test_dtypes"))
    assert run_ranks(command, environment, reports, RANKS, 800) > 20


@pytest.mark.under_each
def test_training_goes_on_without_a_rank(
    two_hosts: Hosts, installation: Installation, environment: dict[str, str]
) -> None:
    if installation.vendor != "Open MPI":
        pytest.skip(f"{installation.vendor} has no ULFM")
    command = on_both(two_hosts, installation, [str(SURVIVE), "--kill", "2"])
    after_mpiexec = command.index(installation.mpiexec) + 1
    command[after_mpiexec:after_mpiexec] = ["--with-ft", "ulfm"]
    code, output = run_limited(command, environment, 120)
    assert code == 0, output
    for rank in range(RANKS - 1):
        assert re.search(rf"rank {rank} of {RANKS - 1}: accuracy 0.9", output), output


def test_a_host_is_cut_off(
    two_hosts: Hosts, installation: Installation, environment: dict[str, str], tmp_path: Path
) -> None:
    """Every rank hears of it within its deadline, and the launcher's ranks end."""
    command = on_both(two_hosts, installation, [str(SCRIPTS / "cut_off.py"), str(tmp_path)])
    with following(command, environment, tmp_path):
        wait_for([tmp_path / f"ready-{rank}" for rank in range(RANKS)], 100, tmp_path / "output")
        two_hosts.cut("node2")
        (tmp_path / "cut").touch()
        wait_for([tmp_path / f"error-{rank}" for rank in range(RANKS)], 60, tmp_path / "output")
    for rank in range(RANKS):
        text = (tmp_path / f"error-{rank}").read_text()
        others = "2, 3" if rank < 2 else "0, 1"
        assert re.search(rf"all_reduce.* timed out on rank {rank} after", text), text
        told = rf"ranks {others}\b" if rank < 2 else "rank 0, which holds it, may be the one"
        assert re.search(told, text), text


def test_the_secret_of_mpiplus_run(two_hosts: Hosts, installation: Installation, environment: dict[str, str]) -> None:
    """It is on no command line, which every user of a node can see, and programs do not get it."""
    command = mpiplus_run(two_hosts, installation.vendor, *ONE_ON_EACH, SCRIPTS / "secrets_seen.py")
    code, output = run_limited(command, environment, 120)
    assert code == 0, output
    for rank in range(2):
        assert f"[rank {rank}] seen: nowhere" in output, output


def test_mpiplus_run_without_a_host_that_is_cut_off(
    two_hosts: Hosts, installation: Installation, environment: dict[str, str], tmp_path: Path
) -> None:
    """The job ends soon after it is told to, and says whom it could not reach."""
    program = ["sh", "-c", 'touch "ready-$RANK"; exec sleep 1000']
    command = mpiplus_run(two_hosts, installation.vendor, *ONE_ON_EACH, "--grace", 1, "-c", *program)
    with following(command, environment, tmp_path) as job:
        wait_for([tmp_path / f"ready-{rank}" for rank in range(2)], 100, tmp_path / "output")
        two_hosts.cut("node2")
        job.terminate()
        code, output = job.wait(60), (tmp_path / "output").read_text()
    assert code == 143, output
    assert re.search("rank 1 on node node2 did not answer .*cannot be reached", output)


@pytest.mark.parametrize(
    ("places", "port"),
    [
        (["node2", "node2"], 0),  # as from the login node of a batch system
        (["node1", "node2"], 29555),  # with ml's default address, 127.0.0.1
    ],
)
def test_a_function_on_other_hosts(
    two_hosts: Hosts,
    installation: Installation,
    environment: dict[str, str],
    tmp_path: Path,
    places: list[str],
    port: int,
) -> None:
    """They share no directory for temporary files with the one where it comes from."""
    hosts = tmp_path / "nodes"
    count = " slots=" if installation.vendor == "Open MPI" else ":"
    hosts.write_text("".join(f"{name}{count}{places.count(name)}\n" for name in dict.fromkeys(places)))
    batch = {
        "PBS_NODEFILE": str(hosts),
        "HYDRA_HOST_FILE": str(hosts),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(two_hosts.agent),
        "PRTE_MCA_prte_default_hostfile": str(hosts),
        "PRTE_MCA_plm_ssh_agent": str(two_hosts.agent),
        "OMPI_MCA_orte_default_hostfile": str(hosts),  # before version 5
        "OMPI_MCA_plm_rsh_agent": str(two_hosts.agent),
    }
    command = two_hosts.on("node1", [fork_server.python(), str(SCRIPTS / "launches.py"), str(port)])
    code, output = run_limited(command, {**environment, **batch, "TMPDIR": str(two_hosts.own)}, 120)
    assert code == 0, output
    assert "from node1" in output
    for rank, name in enumerate(places):
        assert f"rank {rank} on {name}: [2.0, 2.0, 2.0], 100000000 bytes" in output, output
