"""What is known about this process before ``init_process_group``; looking it up initialises nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import launchers


class Launched(NamedTuple):
    """This process among those that were started with it; None where nobody says."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None


class _Names(NamedTuple):
    """The variables of a launcher that go with its variable for the size."""

    rank: str
    local_rank: str
    local_size: str
    node_rank: tuple[str, ...] = ()


# Open MPI's OMPI_COMM_WORLD_NODE_RANK is not here: it counts processes on the node, not nodes.
_NAMES = {
    "OMPI_COMM_WORLD_SIZE": _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_SIZE": _Names("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MV2_COMM_WORLD_SIZE": _Names("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "SLURM_STEP_NUM_TASKS": _Names("SLURM_PROCID", "SLURM_LOCALID", "", ("SLURM_NODEID",)),
    "PALS_SIZE": _Names("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", ("PALS_NODEID",)),
    "FLUX_JOB_SIZE": _Names("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", ""),
    "WORLD_SIZE": _Names("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("NODE_RANK", "GROUP_RANK")),
}
_TORCHRUN = _NAMES["WORLD_SIZE"]


def running_mpi() -> Any:
    """``mpi4py.MPI`` if this program has initialised it already, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def by_mpi(environment: Mapping[str, str] | None = None) -> bool:
    """Whether MPI runs already, or an MPI launcher (rather than torchrun or nobody) started this process."""
    return running_mpi() is not None or launchers.started_by_mpi(environment)


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def _from_variables(environment: Mapping[str, str]) -> Launched:
    if "TORCHELASTIC_RUN_ID" in environment:  # srun or mpirun may have started one torchrun on each node
        own = {"WORLD_SIZE", *_TORCHRUN[:3], *_TORCHRUN.node_rank}
        environment = {name: value for name, value in environment.items() if name in own}
    launch = launchers.detect(environment)
    if launch is None:
        return Launched(0, 1, 0, 1, 0)
    names = _NAMES[launch.variable]
    rank = _number(environment, names.rank)
    if rank is None:
        if launch.size == 1:
            return Launched(0, 1, 0, 1, 0)
        raise RuntimeError(
            f"{launch.launcher} started {launch.size} processes ({launch.variable}={launch.size}), but which of them "
            f"this is, is unknown: {names.rank} is not set"
        )
    if _number(environment, "WORLD_SIZE") == launch.size and _number(environment, _TORCHRUN.rank) == rank:
        names = _TORCHRUN  # mpiplus run, or somebody else who knows the nodes, has described this process too
    local_rank, local_size = _number(environment, names.local_rank), _number(environment, names.local_size)
    return Launched(rank, launch.size, local_rank, local_size, _number(environment, *names.node_rank))


def find(environment: Mapping[str, str] | None = None) -> Launched:
    """This process as MPI has it where MPI runs already, else as its launcher's variables say.

    All on one node is recognised by the sizes, and the local rank is then the rank: Open MPI may number the
    processes of a node in another order than everybody else.
    """
    found = _from_variables(os.environ if environment is None else environment)
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        known = found.size == size and found.rank == rank
        found = found if known else Launched(rank, size, None, None, None)
    if found.size in (1, found.local_size):
        return Launched(found.rank, found.size, found.rank, found.size, 0)
    return found
