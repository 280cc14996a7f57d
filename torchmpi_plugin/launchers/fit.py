"""A test whether the launcher that started this process belongs to the MPI library.

One that does not gives N jobs of one rank each instead of one job of N, silently, or ends them in MPI_Init.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..flavours import MPICH, Library
from .table import SCRIPT
from .variables import Launch, detect, variables_of

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


def check(library: Library) -> None:
    """Refuse a launcher of another MPI while Python can still say so.

    Raises:
        RuntimeError: launcher and library do not belong together.
    """
    launch = misfit(library)
    if launch is not None:
        raise RuntimeError(explain(launch, library))


def explain(launch: Launch, library: Library) -> str:
    """Return an advice where a launcher's ranks are each alone to MPI, or would be."""
    ranks = "1 rank" if launch.size == 1 else f"{launch.size} ranks"
    started = f"{launch.launcher} started {ranks} ({launch.variable}={launch.size})"
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
        f"{variables_of(launch).cure or 'make mpi4py load the MPI of the launcher (MPI4PY_LIBMPI names its file)'}."
    )
