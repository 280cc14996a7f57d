"""Whether the other ranks' processes are still there: what this host's process table tells, and what MPI does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from . import mpi_runtime, node


class Process(NamedTuple):
    """A rank's process: its number alone may be given to another one later."""

    node: str
    pid: int
    started: str


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def this() -> Process:
    """This process, as others on its node may know it."""
    return Process(node.identity(), os.getpid(), _started(os.getpid()))


def if_visible(process: Process) -> Process | None:
    """None for a process on another host, or behind a wall such as a container's."""
    here = process.node == node.identity()
    return process if here and process.started and process.started == _started(process.pid) else None


def has_ended(process: Process | None) -> bool:
    """Whether the process is known to be no more; a zombie counts as gone."""
    if process is None:
        return False
    fields = _stat(process.pid)
    return not fields or fields[0] in "ZX" or fields[19] != process.started


def failed_ranks(comm: Any, listen: bool = False) -> list[int]:
    """The ranks of a communicator that MPI knows to be dead; none where MPI does not tell.

    Args:
        listen: hear the news first, which reaches Open MPI only while it is called.
    """
    mpi = mpi_runtime.mpi()
    with mpi_runtime.exclusive():
        with contextlib.suppress(mpi.Exception):  # which is the news
            for _ in range(100 if listen else 0):
                comm.Iprobe()
        try:
            dead = comm.Get_failed()
        except (NotImplementedError, mpi.Exception):
            return []
        return sorted(mpi.Group.Translate_ranks(dead, list(range(dead.size)), comm.Get_group()))


def is_process_failure(code: int) -> bool:
    """Whether an MPI error means that a process has died, or that another rank has seen one die."""
    mpi = mpi_runtime.mpi()
    return mpi.Get_error_class(code) in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
