"""What ULFM (User Level Failure Mitigation) does with a communicator of which a rank has died."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from . import mpi_runtime
from .errors import DistBackendError


def supported(comm: Any) -> bool:
    """Whether this MPI can tell who has died, and go on without them."""
    try:
        comm.Get_failed().Free()
    except (NotImplementedError, mpi_runtime.mpi().Exception):
        return False
    return True


def revoke(comm: Any) -> None:
    """Wake whoever waits on ``comm``, everywhere.

    Raises:
        NotImplementedError: the MPI has no ULFM.
    """
    if not comm:
        return
    try:
        with mpi_runtime.exclusive():
            comm.Revoke()
    except NotImplementedError:
        raise NotImplementedError(
            f"shrink: {mpi_runtime.library_name(mpi_runtime.mpi())} cannot survive the death of a rank; it needs ULFM, "
            f"as in Open MPI 5 started with mpirun --with-ft ulfm"
        ) from None


def without_the_dead(comm: Any, timeout: timedelta) -> Any:
    """``MPI_Comm_shrink``, which has no deadline of its own.

    Raises:
        DistBackendError: the other survivors did not come in time, or MPI failed.
    """
    try:
        return mpi_runtime.within(timeout.total_seconds(), comm.Shrink)
    except TimeoutError:
        raise DistBackendError(
            f"shrink: after {timeout.total_seconds():g} s not all survivors have called it (this is rank "
            f"{comm.Get_rank()})"
        ) from None
    except mpi_runtime.mpi().Exception as error:
        raise DistBackendError(f"shrink: {error}") from error
