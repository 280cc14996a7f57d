"""The MPI's daemon that has started this rank: it may be killed, and it may outlive a job whose launcher is gone."""

from __future__ import annotations

import contextlib

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
        import psutil  # when it is needed: it takes as long as the rest of a supervisor

        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(self._process)
            if self._process == 1 or process.name() not in DAEMONS or self.has_died():
                return
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except psutil.TimeoutExpired:
                process.kill()


def _parent_of(process: int) -> int:
    return int((peers.stat(process) or ["", "0"])[1])
