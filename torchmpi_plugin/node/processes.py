"""Processes: of this one the limits, of its own children the command, of other ranks' whether they are still there.

Imports neither torch nor MPI.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

from . import node

#: Of open files and connections beside those that a process expects: libraries, devices, pipes, MPI's own.
_OTHERS = 256
#: With fewer MPI may not even start.
_FEW = 64
_ROOT = str(Path(__file__).parents[2])
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


def above() -> list[int]:
    """Return which processes may have started this one: a shell or fork server may stand between."""
    return [os.getppid(), *map(int, stat(os.getppid())[1:2])]


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


# ---- this process, and its children ----


def allow_connections(connections: int) -> None:
    """As far as the system lets us: 1,024 in all is a usual limit, and a small one for a large job."""
    count = connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def scarcity_of_files() -> str:
    """Return a warning before MPI starts, which may end the process without saying who it is; empty: enough."""
    allow_connections(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    why = f"only {most} files may be open (`ulimit -n`): too few for MPI or the job's store; allow {_FEW} or more"
    return why if 0 <= most < _FEW else ""  # RLIM_INFINITY is negative


def python_command(code: str, *arguments: str) -> list[str]:
    """The command line that runs ``code`` in this Python.

    Not with -m, nor with -c alone: both import from the working directory first, where a user may keep a json.py.
    """
    program = f"import sys; sys.path[:1] = []; sys.path.append({_ROOT!r}); {code.lstrip()}"
    return [sys.executable, "-c", program, *arguments]
