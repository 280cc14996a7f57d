"""The groups of this process: those that are open, and the current world.

A job's end, its questions and answers, and new groups go by the world.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..diagnosis import monitor
from ..errors import DistBackendError, RankFailedError
from ..mpi import runtime
from ..names import describe_ranks
from ..node import processes
from ..store.checkin import CheckIn
from . import statistics
from .group import Group

_groups: weakref.WeakSet[Group] = weakref.WeakSet()
_base: Any = None
_processes: dict[int, processes.Process | None] = {}  # of the world, by its ranks there
#: Who has left the current world, or the one before; on a connection that outlives it.
checkin: CheckIn | None = None


def remember(group: Group, name: str) -> None:
    """``group`` is open; what ends the program frees it if the user does not. Its operations are counted."""
    _groups.add(group)
    statistics.count(group, name)


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
    global _base, _processes, checkin  # noqa: PLW0603
    _base = group.communicator.base
    _processes = {group.global_rank(rank): process for rank, process in enumerate(group.communicator.processes)}
    checkin = group.checkin.connected_anew()
    group.serves_store = group.rank() == 0 and group.size() > 1
    if group.size() > 1:
        node, secret = group.communicator.place.node_rank, group.communicator.secret
        elsewhere = [rank for rank in range(group.size()) if group.communicator.node_of(rank) != node]
        monitor.start(group, group.get_group_store(), checkin.store, node, elsewhere, secret)


def gone(ranks: Sequence[int], doing: str) -> DistBackendError | None:
    """The error of whoever waits for ``ranks`` of the world, where one of them has ended."""
    dead = [rank for rank in ranks if processes.has_ended(_processes.get(rank))]
    if dead:
        have = "has" if len(dead) == 1 else "have"
        return RankFailedError(f"{doing}: {describe_ranks(dead)} of the world {have} {processes.ENDED}", ranks=dead)
    departed = checkin.departed() if checkin is not None else {}
    left = [rank for index, rank in enumerate(_processes) if index in departed and rank in ranks]
    if left:
        return DistBackendError(f"{doing}: {describe_ranks(left)} of the world left the job; look for what ended it")
    return None
