"""The MPI's daemon that has started this rank: it may be killed, and it may outlive a job whose launcher is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ..launchers.table import DAEMONS
from ..node import peers

_END_SECONDS = 2.0


class Daemon:
    """The parent of a guard."""

    def __init__(self, guard: int) -> None:
        self._guard = guard
        self._process = _parent_of(guard)

    def has_died(self) -> bool:
        """Return whether the guard has lost its parent, though it lives."""
        now = _parent_of(self._guard)
        return bool(self._process and now and now != self._process)

    def end(self) -> None:
        """Its launcher is gone, and so is what it has started. It waits for a connection that has died too."""
        if self._process <= 1 or _name_of(self._process) not in DAEMONS or self.has_died():
            return
        with contextlib.suppress(OSError):
            os.kill(self._process, signal.SIGTERM)
            until = time.monotonic() + _END_SECONDS
            while time.monotonic() < until and _name_of(self._process):
                time.sleep(0.05)
            if _name_of(self._process) in DAEMONS:
                os.kill(self._process, signal.SIGKILL)


def _parent_of(process: int) -> int:
    return int((peers.stat(process) or ["", "0"])[1])


def _name_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""
