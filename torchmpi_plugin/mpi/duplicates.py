"""Duplicates of the communicators that worlds are made from, for messages before there is a group."""

from __future__ import annotations

import contextlib
import functools
import time
from datetime import timedelta
from typing import Any

from ..errors import DistBackendError
from . import nonblocking, runtime


def _duplicate(base: Any, timeout: timedelta) -> Any:
    """A duplicate of ``base`` for start-up messages. Waits with a deadline for all ranks."""
    comm, request = base.Idup()
    deadline = time.monotonic() + timeout.total_seconds()

    def check() -> None:
        if time.monotonic() > deadline:
            runtime.doubt = "init_process_group gave up here"
            raise DistBackendError(
                f"init_process_group: after {timeout.total_seconds():g} s not all of MPI's {base.Get_size()} "
                f"ranks have called it (this is MPI rank {base.Get_rank()})"
            )

    nonblocking.wait(request, (comm,), check)
    return comm


#: The duplicate of COMM_WORLD, which nobody can free, and whose attributes MPI_Finalize deletes: after Python's end.
_of_world: Any = None
#: The user's communicators that have a duplicate.
_with_duplicate: list[Any] = []


def _free_duplicate(base: Any, _key: int, duplicate: Any) -> None:
    """Called by MPI when the user frees ``base``, and by :func:`forget_all`."""
    if base in _with_duplicate:
        _with_duplicate.remove(base)
        with contextlib.suppress(runtime.mpi().Exception):  # a rank has died
            duplicate.Free()


@functools.cache
def _key() -> int:
    """Of the attribute that ties a duplicate to its communicator: MPI gives the number of a freed one to the next."""
    return int(runtime.mpi().Comm.Create_keyval(delete_fn=_free_duplicate))


def of(base: Any, timeout: timedelta) -> Any:
    """The duplicate of ``base``, made once; all its ranks call this, or get a DistBackendError at the deadline."""
    global _of_world  # noqa: PLW0603
    if base == runtime.mpi().COMM_WORLD:
        _of_world = _of_world or _duplicate(base, timeout)
        return _of_world
    duplicate = base.Get_attr(_key())
    if duplicate is None:
        duplicate = _duplicate(base, timeout)
        base.Set_attr(_key(), duplicate)
        _with_duplicate.append(runtime.mpi().Intracomm(base))  # the user's own object is about to be null then
    return duplicate


def forget(base: Any) -> None:
    """The ranks of ``base`` have lost each other on its duplicate: the next world gets another one."""
    global _of_world  # noqa: PLW0603
    if base == runtime.mpi().COMM_WORLD:
        _of_world = None
    elif base in _with_duplicate:
        _with_duplicate.remove(base)  # not to be freed
        base.Delete_attr(_key())


def forget_all() -> None:
    """Before the end of the program: from then on MPI must not call Python. MPI_Finalize sees to the duplicates."""
    bases = list(_with_duplicate)
    _with_duplicate.clear()
    for base in bases:
        base.Delete_attr(_key())
