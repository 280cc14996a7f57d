"""A launcher of one MPI with the library of another, no mpi4py, and Debian's MPICH."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import fork_server
import pytest
from job_runs import Job, Outcome, run_process
from launch_runs import MPIPLUS, MPIPLUS_MODULE
from mpi_installations import Installation, foreign_launcher, launch_command

PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("mpiplus")
ones = torch.ones(2)
dist.all_reduce(ones)
rank = dist.get_rank()
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libmp" in line.rpartition("/")[2]}
print("sum", ones[0].item(), "on", *sorted(libraries), flush=True)
dist.barrier()
dist.destroy_process_group()
os.write(1, f"[{rank}] end\\n".encode())
"""
BELONG = "The launcher and the library do not belong together"
OF_MPI = r"Fatal error in|Abort\(|NULL communicator"


def names_both(outcome: Outcome, job: Job, launcher: str) -> Outcome:
    """An error of ours, with the cure, and no word of the library's."""
    library = f"mpi4py has loaded {job.installation.vendor} {job.installation.version}"
    text = " ".join(outcome.output.split())
    for words in (f"{launcher} started 2 ranks", library, BELONG, "mpiplus run -n 2 finds it", "MPI4PY_LIBMPI="):
        if words not in text:
            outcome.problem(f"nothing in the output says {words!r}")
    return outcome.failed().says_not(OF_MPI, "sum")


@pytest.fixture
def other(job: Job) -> tuple[list[str], str]:
    """How another MPI's launcher starts two ranks of this Python, and what that launcher is called."""
    mpiexec = foreign_launcher(job.installation)
    if mpiexec is None:
        pytest.skip("only one MPI's launcher is here; MPIPLUS_TEST_OTHER_MPIEXEC names one more")
    vendor = "MPICH" if job.installation.vendor == "Open MPI" else "Open MPI"
    return launch_command(
        mpiexec, vendor, 2, [], fork_server.python()
    ), "hydra)" if vendor == "MPICH" else "Open MPI's mpirun"


def environment(job: Job) -> dict[str, str]:
    """With this job's library named: Open MPI's mpirun puts its own into LD_LIBRARY_PATH."""
    return {"MPI4PY_LIBMPI": job.installation.library, **job.installation.environment}


#: What is started, and what is said beside the error.
STARTED: dict[str, tuple[list[str], list[str]]] = {
    "program": (["-c", PROGRAM], []),
    "info": ([*MPIPLUS_MODULE, "info"], ["PROBLEM: ", "belongs to the library", "not started"]),
}


@pytest.mark.parametrize("what", STARTED)
def test_another_mpis_launcher(job: Job, other: tuple[list[str], str], what: str) -> None:
    (command, launcher), (words, said) = other, STARTED[what]
    outcome = names_both(job.start([*command, *words], environment(job)), job, launcher).says(*said)
    if what != "program":
        outcome.says_not("Traceback")
    assert outcome.stdout.count("mpiplus info") == (what == "info")


@pytest.mark.fresh("variables that are there before the import of torch")
def test_another_launchers_variables(job: Job) -> None:
    """What a launcher leaves in the environment, where there is none: in it MPICH 5 ends the process."""
    of_mpirun = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_RANK": "0"}
    of_hydra = {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "99", "MPI_LOCALRANKID": "0"}
    ours = job.installation.vendor == "Open MPI"
    outcome = job.start([fork_server.python(), "-c", PROGRAM], of_hydra if ours else of_mpirun)
    names_both(outcome, job, "hydra)" if ours else "Open MPI's mpirun")


def test_without_mpi4py(job: Job) -> None:
    outcome = job.start([fork_server.python(), "-c", f"import sys; sys.modules['mpi4py'] = None{PROGRAM}"], None)
    outcome.failed("RuntimeError: mpi4py is not installed, through which .* -m pip install mpi4py")


def test_containers_of_their_own(job: Job) -> None:
    """No rank may read another one's memory. MPICH's collectives do not notice: an error comes before wrong sums."""
    here, words = job.installation, ["-Ur", sys.executable, "-c", PROGRAM]
    outcome = job.start(launch_command(here.mpiexec, here.vendor, 3, words, "unshare"), None)
    if "unshare failed" in outcome.output:
        pytest.skip("no user namespaces here")
    if job.installation.vendor == "Open MPI":
        outcome.says(r"no shared memory .*Permission", "sum 3.0").succeeded(3)
    else:
        outcome.failed("brought other bytes than ranks .* set MPIR_CVAR_CH4_CMA_ENABLE=0")


def test_debians_mpich(tmp_path: Path) -> None:
    """The real one, with a wheel of mpi4py that knows nothing of it."""
    mpiexec = shutil.which("mpiexec.mpich")
    try:
        ctypes.CDLL("libmpich.so.12")
    except OSError:
        mpiexec = None
    if mpiexec is None:
        pytest.skip("Debian's mpich is not installed")
    debian = Installation(mpiexec, "MPICH", "", "libmpich.so.12", {"MPI4PY_LIBMPI": "libmpich.so.12"})
    outcome = run_process(debian.command(2, ["-c", PROGRAM]), debian.full_environment(), tmp_path).succeeded(2)
    assert "sum 2.0 on" in outcome.says("libmpich.so.12").stdout
    run = [MPIPLUS, "run", "-n", "2", "-c", sys.executable, "-c", PROGRAM]
    assert run_process(run, debian.full_environment(), tmp_path).says("sum 2.0").code == 0
