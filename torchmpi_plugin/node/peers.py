"""A test whether other ranks' processes are still there, as far as this node's table of processes tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from . import node

#: What is said of a rank whose process is gone: it "has" or "they have" ...
ENDED = "ended without a word: killed, out of memory, or os._exit()"


class Process(NamedTuple):
    """A rank's process: its number alone may be given to another one later."""

    node: str
    pid: int
    started: str


# Not psutil's create_time: it adds the time of the boot, which each process that asks computes from the clock of that
# moment, so two need not get the same number. And who asks does so while operations wait.
def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = stat(pid)
    return fields[19] if len(fields) > 19 else ""


def this() -> Process:
    """This process, as others on its node may know it."""
    return Process(node.identity(), os.getpid(), _started(os.getpid()))


def if_visible(process: Process) -> Process | None:
    """None for a process on another node, or behind a wall such as a container's."""
    here = process.node == node.identity()
    return process if here and process.started and process.started == _started(process.pid) else None


def has_ended(process: Process | None) -> bool:
    """Return whether the process is known to be no more; a zombie counts as gone."""
    if process is None:
        return False
    fields = stat(process.pid)
    return not fields or fields[0] in "ZX" or fields[19] != process.started
