"""Ranks that MPI knows to be dead, and what ULFM (User Level Failure Mitigation) does with what is left of them."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from ..errors import DistBackendError
from . import runtime


def failed_ranks(comm: Any, listen: bool = False) -> list[int]:
    """The ranks of a communicator that MPI knows to be dead; none where MPI does not tell.

    Who listens hears the news first, which reaches Open MPI only while it is called.
    """
    mpi = runtime.mpi()
    with runtime.exclusive():
        with contextlib.suppress(mpi.Exception):  # which is the news
            for _ in range(100 if listen else 0):
                comm.Iprobe()
        try:
            dead = comm.Get_failed()
        except (NotImplementedError, mpi.Exception):
            return []
        return sorted(mpi.Group.Translate_ranks(dead, list(range(dead.size)), comm.Get_group()))


def is_process_failure(code: int) -> bool:
    """Return whether an MPI error means that a process has died, or that another rank has seen one die."""
    mpi = runtime.mpi()
    return mpi.Get_error_class(code) in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)


def supported(comm: Any) -> bool:
    """Return whether this MPI can tell who has died, and go on without them."""
    try:
        comm.Get_failed().Free()
    except (NotImplementedError, runtime.mpi().Exception):
        return False
    return True


def revoke(comm: Any) -> None:
    """Wake whoever waits on ``comm``, everywhere; a NotImplementedError where the MPI has no ULFM."""
    if not comm:
        return
    try:
        with runtime.exclusive():
            comm.Revoke()
    except NotImplementedError:
        raise NotImplementedError(
            f"shrink: {runtime.library_name(runtime.mpi())} cannot survive the death of a rank; it needs ULFM, "
            f"as in Open MPI 5 started with mpirun --with-ft ulfm"
        ) from None


def without_the_dead(comm: Any, timeout: timedelta) -> Any:
    """``MPI_Comm_shrink``, with a deadline; a DistBackendError: other survivors did not come in time, or MPI failed."""
    try:
        return runtime.within(timeout.total_seconds(), comm.Shrink)
    except TimeoutError:
        raise DistBackendError(
            f"shrink: after {timeout.total_seconds():g} s not all survivors have called it (this is rank "
            f"{comm.Get_rank()})"
        ) from None
    except runtime.mpi().Exception as error:
        raise DistBackendError(f"shrink: {error}") from error
