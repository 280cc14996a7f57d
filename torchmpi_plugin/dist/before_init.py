"""Facts about this process before ``init_process_group``; looking them up initialises nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..launchers import variables as launchers
from ..launchers.table import OF_SCRIPTS
from ..launchers.variables import number


class Launched(NamedTuple):
    """This process among those that were started with it; None where nobody says."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None


def running_mpi() -> Any:
    """``mpi4py.MPI`` if this program has initialised it already, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def by_mpi() -> bool:
    """Return whether MPI runs already, or an MPI launcher (rather than torchrun or nobody) started this process."""
    return running_mpi() is not None or launchers.started_by_mpi()


def _from_variables(environment: Mapping[str, str]) -> Launched:
    torchrun = OF_SCRIPTS
    if "TORCHELASTIC_RUN_ID" in environment:  # srun or mpirun may have started one torchrun on each node
        own = {torchrun.size, torchrun.rank, torchrun.local_rank, torchrun.local_size, *torchrun.node_rank}
        environment = {name: value for name, value in environment.items() if name in own}
    launch = launchers.detect(environment)
    if launch is None:
        return Launched(0, 1, 0, 1, 0)
    names = launchers.variables_of(launch)
    rank = number(environment, names.rank)
    if rank is None:
        if launch.size == 1:
            return Launched(0, 1, 0, 1, 0)
        raise RuntimeError(
            f"{launch.launcher} started {launch.size} processes ({launch.variable}={launch.size}), but which of them "
            f"this is, is unknown: {names.rank} is not set"
        )
    if number(environment, torchrun.size) == launch.size and number(environment, torchrun.rank) == rank:
        names = torchrun  # mpiplus run, or somebody else who knows the nodes, has described this process too
    local_rank, local_size = number(environment, names.local_rank), number(environment, names.local_size)
    return Launched(rank, launch.size, local_rank, local_size, number(environment, *names.node_rank))


def find(environment: Mapping[str, str] = os.environ) -> Launched:
    """This process as MPI has it where MPI runs already, else as its launcher's variables say.

    All on one node is recognised by the sizes, and the local rank is then the rank: Open MPI may number the
    processes of a node in another order than everybody else.
    """
    found = _from_variables(environment)
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        known = found.size == size and found.rank == rank
        found = found if known else Launched(rank, size, None, None, None)
    if found.size in (1, found.local_size):
        return Launched(found.rank, found.size, found.rank, found.size, 0)
    return found
