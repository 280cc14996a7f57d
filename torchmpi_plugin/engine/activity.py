"""Activity of this process: the last operation that it has called, and those that its threads wait for."""

from __future__ import annotations

import threading

from .contracts import Owner, Pending

#: The last operation that was begun, and its group. A plain assignment on every operation's way.
last: tuple[Owner, str] | None = None
#: By thread: what it has waited for for a while.
waiting: dict[int, Pending] = {}


def waits(work: Pending | None) -> None:
    """This thread has waited for ``work`` for a while; None: for nothing any more."""
    if work is not None:
        waiting[threading.get_ident()] = work
    elif waiting:
        waiting.pop(threading.get_ident(), None)


def is_waited_for(group: Owner) -> bool:
    """Return whether a thread has waited for an operation of ``group`` for a while."""
    return any(work.group is group for work in list(waiting.values()))


def forget(group: Owner) -> None:
    """``group`` has ended; nothing here may keep it, or the store it holds, alive."""
    global last  # noqa: PLW0603
    if last is not None and last[0] is group:
        last = None
