"""The batch scripts of the documentation, submitted to a real Slurm with two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from mpi_installations import Installation
from patience import patient, wait_until

SCRIPTS = Path(__file__).parents[2] / "docs/batch"
SECONDS = patient(100)
TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("mpiplus")
rank = dist.get_rank()
tensor = torch.full((4,), float(rank + 1))
dist.all_reduce(tensor)
# In one piece, as the ranks share what they print to; and before a rank fails, which ends the others.
words = ("sum", tensor[0].item(), "of", dist.get_world_size(), "node", os.environ["NODE_RANK"], sys.argv[1:])
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
dist.barrier()
if "fail" in sys.argv and rank == 3:
    raise ArithmeticError("this one is meant")
if "fail first" in sys.argv and rank == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ArithmeticError("the first start fails")
if "wait" in sys.argv:
    open(f"{sys.argv[-1]}-{os.environ['RANK']}", "w").write(str(os.getpid()))
    if rank == 0:
        time.sleep(1000)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def train(slurm: Cluster) -> str:
    path = slurm.directory / "train.py"
    path.write_text(TRAIN)
    return str(path)


@pytest.fixture
def environment(installation: Installation) -> dict[str, str]:
    return {
        **installation.full_environment(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MPI_TYPE": "pmix" if installation.vendor == "Open MPI" else "pmi2",
        # Slurm's nodes share a kernel, so UCX takes them for one and uses shared memory between them.
        "UCX_TLS": "tcp",
    }


def check_sums(output: str) -> None:
    for node in (0, 1):
        assert output.count(f"sum 10.0 of 4 node {node} ['--lr', '0.1']") == 2, output


def test_mpirun(slurm: Cluster, train: str, environment: dict[str, str]) -> None:
    code, output = slurm.submit(SCRIPTS / "slurm-mpirun.sh", [train, "--lr", "0.1"], environment, SECONDS)
    assert code == 0, output
    check_sums(output)
    files = sorted(path.name for path in (slurm.directory / "logs").glob("*/*.out"))
    assert set(files) == {f"{rank}.out" for rank in range(4)}


def test_srun(slurm: Cluster, train: str, environment: dict[str, str]) -> None:
    code, output = slurm.submit(SCRIPTS / "slurm-srun.sh", [train, "--lr", "0.1"], environment, SECONDS)
    assert code == 0, output
    check_sums(output)


def test_mpiplus_run_through_srun(slurm: Cluster, train: str, environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=2\nexec mpiplus run --launcher srun "$@"\n')
    code, output = slurm.submit(script, [train, "--lr", "0.1"], environment, SECONDS)
    assert code == 0, output
    check_sums(output)


def test_a_failure_under_mpirun(slurm: Cluster, train: str, environment: dict[str, str]) -> None:
    code, output = slurm.submit(SCRIPTS / "slurm-mpirun.sh", [train, "fail"], environment, SECONDS)
    assert code == 1, output
    assert f"rank 3 on node {slurm.network.names[1]} failed first" in output
    assert output.rindex("ArithmeticError: this one is meant") > output.rindex("sum 10.0")


def test_a_failure_under_srun(slurm: Cluster, train: str, environment: dict[str, str]) -> None:
    code, output = slurm.submit(SCRIPTS / "slurm-srun.sh", [train, "fail"], environment, SECONDS)
    assert code != 0, output
    assert "ArithmeticError: this one is meant" in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_requeue(slurm: Cluster, train: str, environment: dict[str, str], launcher: str) -> None:
    """A rank fails in the first start; Slurm starts the job again, some 30 s later, and that comes to its end."""
    words = [train, "fail first"]
    environment |= {"LAUNCHER": launcher, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code, output = slurm.submit(SCRIPTS / "slurm-requeue.sh", words, environment, 3 * SECONDS)
    assert code == 0, output
    assert "ArithmeticError: the first start fails" in output, output
    assert output.count("sum 10.0 of 4") == 8, output


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_scancel(slurm: Cluster, train: str, environment: dict[str, str], tmp_path: Path, launcher: str) -> None:
    """While ranks wait for another one, as `mpiplus status` says: all of them end, on both nodes."""
    environment = {**environment, "MPIPLUS_STATUS_DIRECTORY": str(tmp_path / "sockets")}
    batch = slurm.start(SCRIPTS / f"slurm-{launcher}.sh", [train, "wait", str(tmp_path / "ready")], environment)
    files = [tmp_path / f"ready-{rank}" for rank in range(4)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), SECONDS, pause=0.1)
    wait_until(lambda: "rank 0 is behind" in status(slurm, environment), SECONDS, pause=0.1)
    slurm.run("scancel", batch.job)
    assert "JobState=CANCELLED" in slurm.wait(batch, SECONDS)
    processes = [Path("/proc") / file.read_text() for file in files]
    wait_until(lambda: not any(process.exists() for process in processes), SECONDS, pause=0.1)


def status(slurm: Cluster, environment: dict[str, str]) -> str:
    """What `mpiplus status` says on the first node, outside of the job."""
    command = slurm.on(slurm.network.names[0], "mpiplus", "status")
    full = {**os.environ, **environment}
    return subprocess.run(command, env=full, check=False, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("plug_in", ["none", "the other"])
def test_the_wrong_plug_in_is_an_error(slurm: Cluster, train: str, environment: dict[str, str], plug_in: str) -> None:
    """Not four jobs of one rank, each a success, and not only words of the MPI library."""
    other = "pmi2" if environment["MPI_TYPE"] == "pmix" else "pmix"
    environment = {**environment, "MPI_TYPE": other if plug_in == "the other" else plug_in}
    code, output = slurm.submit(SCRIPTS / "slurm-srun.sh", [train, "--lr", "0.1"], environment, SECONDS)
    assert code != 0, output
    assert "Slurm's srun started 4 ranks" in output
    assert "choose another srun --mpi" in output
    assert "sum" not in output
