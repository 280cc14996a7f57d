"""This process answers ``mpiplus status``: a thread in C, on a socket, from the first world to the end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from .. import settings
from ..engine import engine
from ..names import log
from . import files

#: Of the signals for applications one that is hardly in use: faulthandler writes the stacks on it.
STACK_SIGNAL = signal.SIGRTMAX - 3
_path: Path | None = None


def start(rank: int, size: int, node_rank: int, secret: str) -> None:
    """Answer for this rank of a new world; where that is impossible, say so in the log and do without.

    Args:
        secret: the world's, which makes the names of two jobs with one MASTER_PORT differ.
    """
    global _path  # noqa: PLW0603
    if not settings.STATUS.value():
        return
    stop()
    lib = engine.start().lib
    job = f"{os.environ.get('MASTER_PORT', '0')}-{hashlib.sha256(secret.encode()).hexdigest()[:4]}"
    about = {
        "job": job,
        "world_rank": rank,
        "world_size": size,
        "node_rank": node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": " ".join(sys.argv)[:200],
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        "since": time.time(),
    }
    members = json.dumps(about)[1:-1].encode()
    try:
        path = files.socket_of(job, rank)
        with files.listen_at(path) as listening:
            if not lib.mpp_status_start(listening.fileno(), members, _stacks_file(), STACK_SIGNAL):
                raise MemoryError("no memory for a thread that answers")
            listening.detach()
        _path = path
        _stop_at_exit()
    except Exception as error:
        log.info("mpiplus: mpiplus status will not find this process in %s: %s", files.directory(), error)


def stop() -> None:
    global _path  # noqa: PLW0603
    if _path is not None:
        engine.start().lib.mpp_status_stop()
        with contextlib.suppress(OSError):
            _path.unlink()
        _path = None


@functools.cache
def _stacks_file() -> int:
    """A file in memory, to which faulthandler writes all threads' stacks on a signal; -1: it cannot."""
    try:
        descriptor = os.memfd_create("mpiplus-stacks")
        faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)
    except (OSError, RuntimeError, ValueError):
        return -1
    return descriptor


@functools.cache
def _stop_at_exit() -> None:
    owner = os.getpid()
    atexit.register(lambda: stop() if os.getpid() == owner else None)
