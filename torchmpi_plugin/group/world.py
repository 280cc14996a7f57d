"""The groups of this process: those that are open, and the current world.

A job's end, its questions and answers, and new groups go by the world.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..diagnosis import monitor
from ..mpi import runtime
from ..store.checkin import CheckIn
from .group import Group

_groups: weakref.WeakSet[Group] = weakref.WeakSet()
_base: Any = None
#: Who has left the current world, or the one before; on a connection that outlives it.
checkin: CheckIn | None = None


def remember(group: Group) -> None:
    """``group`` is open; what ends the program frees it if the user does not."""
    _groups.add(group)


def remembered() -> list[Group]:
    """All that somebody still holds; destroyed ones too, which may have had to keep what MPI was busy with."""
    return list(_groups)


def groups() -> list[Group]:
    """Those that have not been destroyed."""
    return [group for group in _groups if not group.closed]


def base() -> Any:
    """The communicator that ranks of new groups come from."""
    return _base if _base is not None else runtime.mpi().COMM_WORLD


def adopt(group: Group) -> None:
    """``group`` is the world from now on; who leaves it leaves the job."""
    global _base, checkin  # noqa: PLW0603
    _base = group.communicator.base
    checkin = group.checkin.connected_anew()
    if group.size() > 1:
        monitor.start(group, group.get_group_store(), checkin.store)


def is_current(group: Group) -> bool:
    """Whether ``group`` is the world."""
    return monitor.answers_for(group)
