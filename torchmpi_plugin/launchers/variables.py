"""The launcher that started this process, the rank it gave, and whether it fits MPI, as environment variables tell."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import NamedTuple

from .. import settings
from ..flavours import MPICH, Library
from ..names import counted
from ..node import processes
from .table import LAUNCHERS, OF_MPI, OF_SCRIPTS, PREFIXES, SCRIPT, SLURM, Kind

#: As messages call it.
TORCHRUN = "torchrun"


class Launch(NamedTuple):
    """A launcher's words about the job that this process is part of."""

    launcher: str
    size: int
    variable: str


def number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is one."""
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def spawned(environment: Mapping[str, str]) -> bool:
    """Return whether multiprocessing (``mp.spawn``) started this process, outside of a rank, to be a rank itself."""
    return multiprocessing.parent_process() is not None and settings.RANK_PROCESS not in environment


def detect(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launcher that says how many ranks there are, or None where none does."""
    inherited = "TORCHELASTIC_RUN_ID" in environment or spawned(environment)
    for row in LAUNCHERS:
        size = number(environment, row.size)
        if size is None or (row.beside and number(environment, row.beside) is None):
            continue
        # What started torchrun has started one process per node, whose variables torchrun's ranks inherit.
        if inherited and row is not OF_SCRIPTS and str(size) != environment.get("WORLD_SIZE", str(size)):
            continue
        return Launch(row.launcher, size, row.size)
    return None


def variables_of(launch: Launch) -> Kind:
    """All that this launcher tells."""
    return next(row for row in LAUNCHERS if row.size == launch.variable)


def started_by_mpi(environment: Mapping[str, str] = os.environ, size: int | None = None) -> bool:
    """Return whether a launcher that MPI knows (or should know) started this process.

    Args:
        environment: with the launcher's variables.
        size: of the world that the program wants, where that is in no variable.
    """
    launch = detect(environment)
    if launch is None or launch.launcher == SCRIPT:
        return False
    return size in (None, launch.size) or not spawned(environment)


def started_by(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that says how many ranks there are; torchrun itself, where srun has started one on each node."""
    size = environment.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environment and size.isdigit():
        return Launch(TORCHRUN, int(size), "WORLD_SIZE")
    return detect(environment)


def is_shell_step(launch: Launch, environment: Mapping[str, str]) -> bool:
    """Return whether this may be a user's shell in an allocation (``srun --pty bash``): an srun step of one task."""
    of_srun = launch.variable in ("SLURM_STEP_NUM_TASKS", "PMI_SIZE")  # the latter from srun --mpi=pmi2
    return of_srun and launch.size == 1 and environment.get("SLURM_STEP_NUM_TASKS") == "1"


class Identity(NamedTuple):
    """This process among those of its job; a size of 0 is one that nobody told."""

    rank: int
    size: int


def who_am_i(environment: Mapping[str, str]) -> Identity | None:
    """This process's rank and the number of ranks, or None where no launcher that MPI knows says."""
    for row in OF_MPI:
        rank = number(environment, row.rank)
        if rank is None:
            continue
        size = number(environment, row.size)
        if size is None and started_by_mpi(environment) and (launch := detect(environment)) is not None:
            size = launch.size
        return Identity(rank, size or 0)
    return None


def slurms_word(rank: int) -> str:
    """Return why several processes may have this rank (a batch script's variables of Slurm's); empty if not so."""
    launch, me = detect(), who_am_i(os.environ)
    if launch is None or me is None or os.environ.get(SLURM.rank) != str(rank):
        return ""
    if launch.launcher == SCRIPT or variables_of(launch) is SLURM:
        return ""
    return (
        f"It comes from the batch script's own SLURM_PROCID={rank}, which reaches every process; this one is MPI's "
        f"rank {me.rank} of {launch.size}. Start the job with mpiplus run or srun, or have the program ask MPI: in "
        f"Lightning by Trainer(plugins=[MPIEnvironment()])"
    )


def speaks(environment: Mapping[str, str]) -> bool:
    """Return whether this rank is the one to warn."""
    me = who_am_i(environment)
    if "TORCHELASTIC_RUN_ID" in environment or me is None:
        return environment.get("RANK", "0") == "0"
    return me.rank == 0


# ---- whether the launcher belongs to the MPI library ----
#
# One that does not gives N jobs of one rank each instead of one job of N, silently, or ends them in MPI_Init.

# With one of these a library of the MPICH family has another way to its peers than the PMIx of mpirun.
_OTHER_WAYS = ("PMI_SIZE", "PMI_FD", "PMI_PORT", "I_MPI_PMI", "I_MPI_PMI_LIBRARY")


def misfit(library: Library, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launcher of this process, where it certainly cannot make one world of this library's ranks.

    It must be known before MPI_Init, in which MPICH 5 ends the process. What may work (srun serves several kinds of
    ranks, and a library may have been built for more than its own launcher) is left to show itself.
    """
    launch = detect(environment)
    if launch is None:
        return None
    over_pmix = "PMIX_NAMESPACE" in environment
    several = launch.size > 1
    if not library.flavour.by_pmi:
        by_hydra = launch.variable == "PMI_SIZE" and "MPI_LOCALRANKID" in environment
        return launch if by_hydra and several and not over_pmix else None
    if not over_pmix or library.pmix or any(name in environment for name in _OTHER_WAYS):
        return None
    ends = library.vendor == MPICH.name and library.major >= 5  # also a process on its own
    return launch if ends or (several and launch.variable == "OMPI_COMM_WORLD_SIZE") else None


def check_fit(library: Library) -> None:
    """A RuntimeError for a launcher that does not belong to the MPI library, while Python can still say so."""
    launch = misfit(library)
    if launch is not None:
        raise RuntimeError(explain_misfit(launch, library))


def explain_misfit(launch: Launch, library: Library) -> str:
    """Return an advice where a launcher's ranks are each alone to MPI, or would be."""
    started = f"{launch.launcher} started {counted(launch.size, 'rank')} ({launch.variable}={launch.size})"
    loaded = f"mpi4py has loaded {library.name} ({library.path})"
    if launch.launcher == SCRIPT:
        return (
            f"{started}, and {loaded}, to which each is a world of one rank. Start the job with the mpirun/mpiexec of "
            f"that MPI; or, with an MPI of the MPICH family, let init_process_group('mpiplus') with the default "
            f"init_method start MPI, before anything else does (importing mpi4py.MPI does)."
        )
    return (
        f"{started}, but {loaded}. The launcher and the library do not belong together. Start the job with the "
        f"mpirun/mpiexec of {library.name} (mpiplus run -n {launch.size} finds it), or "
        f"{variables_of(launch).cure or library.cure}."
    )


# ---- children of ranks ----

#: How the names of variables begin that make a process a rank; what an error advises.
_OF_A_JOB = (*PREFIXES, "MPI", *OF_SCRIPTS.prefixes)


def _identity() -> str:
    kinds = OF_MPI if started_by_mpi() else (OF_SCRIPTS,)
    return " ".join(os.environ.get(name, "-") for kind in kinds for name in (kind.rank, *kind.identity))


def mark_as_rank() -> None:
    """Tell child processes, which inherit the launcher's variables, that the rank is this process."""
    if detect() is not None:
        os.environ[settings.RANK_PROCESS] = f"{os.getpid()} {_identity()}"


def rank_above() -> str | None:
    """The process of the rank that started this one, with the rank's variables; None where no rank did."""
    if not started_by_mpi() and os.environ.get("WORLD_SIZE") == "1":
        return None  # the parent was no rank of MPI's, but a world of its own, as this process may be
    pid, _, identity = os.environ.get(settings.RANK_PROCESS, "").partition(" ")
    return pid if pid.isdigit() and int(pid) in processes.above() and identity == _identity() else None


def check_not_a_ranks_child() -> None:
    """Refuse to start MPI in a child of a rank: MPI would take it for the rank, whose memory it then spoils.

    Raises:
        RuntimeError: this process was started by a rank, with the rank's variables.
    """
    if (pid := rank_above()) is not None:
        raise RuntimeError(
            f"mpiplus: this process ({os.getpid()}) was started by process {pid}, which is a rank of a job, and is no "
            f"rank itself; it cannot take part. If it is a worker (of a DataLoader or of multiprocessing, by spawn or "
            f"forkserver), it imports the script first: put init_process_group and what follows under "
            f"if __name__ == '__main__':. If it is a program of its own, a world of one, start it without the job's "
            f"variables: env={{n: v for n, v in os.environ.items() if not n.startswith({_OF_A_JOB})}}"
        )
