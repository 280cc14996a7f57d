"""Going on without the ranks that died, where MPI can (ULFM: User Level Failure Mitigation)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import mpi_runtime, shutdown
from .errors import DistBackendError
from .groups import resolve
from .options import Options


def shrink(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a new world of the ranks that are still alive, and return it.

    To be called by every survivor once an operation has raised RankFailedError; ranks that wait in an
    operation of the old world get an error from it. The old world and its groups are destroyed. The new
    ranks count from 0 in the order of the old ones; what the dead ranks held is lost, so go on from a
    checkpoint. MPI is not finalised at the end of the program: Open MPI 5.0.11 may wait there for the dead.
    Needs Open MPI 5 started with ``mpirun --with-ft ulfm``; any rank may be the dead one.

    Args:
        group: the world.
        timeout: how long to wait for the other survivors, and the new world's; the old world's if None.

    Returns:
        The new world, which is also ``torch.distributed``'s default group.

    Raises:
        NotImplementedError: the MPI has no ULFM.
        ValueError: a group that is not the world.
        DistBackendError: the other survivors did not come in time.
    """
    old = resolve(group)
    mpi_runtime.refuse_in_forked_child("shrink")
    if old is not dist.group.WORLD:
        raise ValueError("shrink: only the world can be shrunk; make its subgroups anew afterwards")
    timeout = timeout or old.timeout
    for each in shutdown.groups():
        _revoke(each.communicator.comm)
        each.abort()
    survivors = _shrink(old.communicator.comm, timeout)
    mpi_runtime.leave_unfinalized()
    dist.destroy_process_group()
    dist.init_process_group("mpiplus", init_method="mpi://", timeout=timeout, pg_options=Options(comm=survivors))
    return dist.group.WORLD


def _revoke(comm: Any) -> None:
    """Wake whoever waits on ``comm``, everywhere."""
    if not comm:
        return
    try:
        comm.Revoke()
    except NotImplementedError:
        raise NotImplementedError(
            f"shrink: {mpi_runtime.library_name(mpi_runtime.mpi())} cannot survive the death of a rank; it needs ULFM, "
            f"as in Open MPI 5 started with mpirun --with-ft ulfm"
        ) from None


def _shrink(comm: Any, timeout: timedelta) -> Any:
    """``MPI_Comm_shrink``, which has no deadline, on a thread that is left behind where it does not come back."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(comm.Shrink())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="mpiplus-shrink", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if not outcome:
        raise DistBackendError(
            f"shrink: after {timeout.total_seconds():g} s not all survivors have called it (this is rank "
            f"{comm.Get_rank()})"
        )
    if isinstance(outcome[0], Exception):
        raise DistBackendError(f"shrink: {outcome[0]}") from outcome[0]
    return outcome[0]
