"""What torch's profiler sees: an event named "mpiplus:all_reduce" for each operation, as other backends have theirs.

An event begins with the call. It ends when the operation is complete, which for an asynchronous one is on another
thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import torch_internals
from .contracts import Begun

#: Whether this thread is being profiled.
wanted = torch_internals.profiler_check()
#: The event of the operation that a thread is about to start, by thread.
events: dict[int, Any] = {}


def begin(operation: str) -> None:
    """An operation begins on this thread."""
    end(None)  # of one that raised before it came to its end
    event = events[threading.get_ident()] = torch.profiler.record_function(f"mpiplus:{operation}")
    event.__enter__()


def end(work: Begun | None) -> None:
    """The operation that began on this thread has become ``work``."""
    event = events.pop(threading.get_ident(), None)
    if event is None:
        return
    if work is None or work.finished:
        event.__exit__(None, None, None)
    else:
        torch_internals.end_with(event, work.get_future())
