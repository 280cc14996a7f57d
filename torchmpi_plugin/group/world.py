"""The current world: the group that a job's end, its questions and answers, and new groups go by."""

from __future__ import annotations

from typing import Any

from . import mpi_runtime, shutdown, status
from .group import Group

_base: Any = None


def base() -> Any:
    """The communicator that ranks of new groups come from."""
    return _base if _base is not None else mpi_runtime.mpi().COMM_WORLD


def adopt(group: Group) -> None:
    """``group`` is the world from now on; who leaves it leaves the job."""
    global _base  # noqa: PLW0603
    _base = group.communicator.base
    lasting = shutdown.remember_world(group)
    if group.size() > 1:
        status.start(group, group.get_group_store(), lasting.store)


def is_current(group: Group) -> bool:
    """Whether ``group`` is the world."""
    return status.answers_for(group)
