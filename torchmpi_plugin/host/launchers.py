"""Which launcher started this process, as its environment variables tell.

Used to notice a launcher that does not belong to the MPI library: it gives N jobs of one rank each instead of one
job of N, silently, or ends them in MPI_Init.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import NamedTuple

from . import settings
from .mpi_library import MPICH, OPEN_MPI, Library


class Launch(NamedTuple):
    """One launcher's word on this process."""

    launcher: str
    size: int
    variable: str


_SCRIPT = "torchrun or a script"
_HYDRA = "an MPICH-family mpiexec (hydra)"
# In this order: inside a Slurm allocation, ranks started by mpirun carry the SLURM_* of the daemon's step. PMI_SIZE
# alone is also Slurm's (srun --mpi=pmi2) and Flux's.
_SIZES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", None),
    (_HYDRA, "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", None),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("PALS (aprun/mpiexec)", "PALS_SIZE", None),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    (_HYDRA, "PMI_SIZE", None),
    (_SCRIPT, "WORLD_SIZE", "RANK"),
)
# With one of these a library of the MPICH family has another way to its peers than the PMIx of mpirun.
_OTHER_WAYS = ("PMI_SIZE", "PMI_FD", "PMI_PORT", "I_MPI_PMI", "I_MPI_PMI_LIBRARY")
_CURES = {
    "OMPI_COMM_WORLD_SIZE": "make mpi4py load Open MPI (MPI4PY_LIBMPI=libmpi.so.40, or its full path)",
    "PMI_SIZE": "make mpi4py load MPICH (MPI4PY_LIBMPI=libmpi.so.12, on Debian libmpich.so.12, or its full path)",
    "SLURM_STEP_NUM_TASKS": "choose another srun --mpi=... (pmix for Open MPI, pmi2 for MPICH and its relatives)",
}


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


# ---- launcher and library ----


def misfit(library: Library, environment: Mapping[str, str] | None = None) -> Launch | None:
    """The launcher of this process, where it certainly cannot make one world of this library's ranks.

    It must be known before MPI_Init, in which MPICH 5 ends the process. What may work (srun serves several kinds of
    ranks, and a library may have been built for more than its own launcher) is left to show itself.
    """
    environment = os.environ if environment is None else environment
    launch = detect(environment)
    if launch is None:
        return None
    over_pmix = "PMIX_NAMESPACE" in environment
    several = launch.size > 1
    if library.family == OPEN_MPI:
        by_hydra = launch.variable == "PMI_SIZE" and "MPI_LOCALRANKID" in environment
        return launch if by_hydra and several and not over_pmix else None
    if not over_pmix or library.pmix or any(name in environment for name in _OTHER_WAYS):
        return None
    ends = library.vendor == MPICH and int(library.version.partition(".")[0]) >= 5  # also a process on its own
    return launch if ends or (several and launch.variable == "OMPI_COMM_WORLD_SIZE") else None


def check_fits(library: Library) -> None:
    """Refuse a launcher of another MPI while Python can still say so.

    Raises:
        RuntimeError: launcher and library do not belong together.
    """
    launch = misfit(library)
    if launch is not None:
        raise RuntimeError(misfit_text(launch, library))


def misfit_text(launch: Launch, library: Library) -> str:
    """What to do where a launcher's ranks are each alone to MPI, or would be."""
    ranks = "1 rank" if launch.size == 1 else f"{launch.size} ranks"
    started = f"{launch.launcher} started {ranks} ({launch.variable}={launch.size})"
    loaded = f"mpi4py has loaded {library.name} ({library.path})"
    if launch.launcher == _SCRIPT:
        return (
            f"{started}, and {loaded}, to which each is a world of one rank. Start the job with the mpirun/mpiexec of "
            f"that MPI; or, with an MPI of the MPICH family, let init_process_group('mpiplus') with the default "
            f"init_method start MPI, before anything else does (importing mpi4py.MPI does)."
        )
    return (
        f"{started}, but {loaded}. The launcher and the library do not belong together. Start the job with the "
        f"mpirun/mpiexec of {library.name} (mpiplus run -n {launch.size} finds it), or "
        f"{_CURES.get(launch.variable, 'make mpi4py load the MPI of the launcher (MPI4PY_LIBMPI names its file)')}."
    )


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
