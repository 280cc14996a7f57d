"""Operations under way, as the engine and whoever reports on them see them; and which of them threads wait for."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Pending(Protocol):
    """A Work, which knows the engine, as the engine and whoever reports on it need it: ``PendingWork``."""

    handle: int
    caller: int
    finished: bool
    abandoned: bool
    call: Any
    group: Any

    def elapsed(self) -> float: ...
    def complete(self, handle: int, state: int) -> int: ...
    def resolve(self) -> None: ...
    def check_deadline(self) -> None: ...
    def abandon_aborted(self) -> None: ...


#: By thread: what it has waited for for a while.
waiting: dict[int, Pending] = {}


def waits(work: Pending | None) -> None:
    """This thread has waited for ``work`` for a while; None: for nothing any more."""
    if work is not None:
        waiting[threading.get_ident()] = work
    elif waiting:
        waiting.pop(threading.get_ident(), None)


def is_waited_for(group: Any) -> bool:
    """Return whether a thread has waited for an operation of ``group`` for a while."""
    return any(work.group is group for work in list(waiting.values()))
