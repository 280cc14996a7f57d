"""The operations that the threads of this process wait for."""

from __future__ import annotations

import threading

from .contracts import Owner, Pending

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
