"""mpirun as a process: what it says itself, and how it is made to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

SECONDS = 5.0  # for mpirun to end once its ranks have, and again once it is told to
_NOISE_BYTES = 1 << 16
_NEVER = float("inf")


class LauncherProcess:
    """mpirun, started in a session of its own: Ctrl-C is for the watch to pass on."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert self._process.stdout is not None
        self._descriptor = self._process.stdout.fileno()
        os.set_blocking(self._descriptor, False)
        self._terminate_at = self._kill_at = _NEVER
        self.noise = ""
        self.is_quiet = False

    def fileno(self) -> int:
        """For selectors: there is something to read."""
        return self._descriptor

    def read(self) -> None:
        """Take what mpirun itself says, or a supervisor that cannot connect; ``is_quiet`` at the end of it."""
        data = os.read(self._descriptor, 1 << 16)
        self.is_quiet = not data
        if len(self.noise) < _NOISE_BYTES:
            self.noise += data.decode(errors="replace")

    def code(self) -> int | None:
        """How it ended, as the shell has it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def end_at(self, moment: float) -> None:
        """When to tell it to end, unless that was to come earlier; it is killed some seconds later."""
        self._terminate_at = min(self._terminate_at, moment)

    def press(self, now: float) -> None:
        """Do what is due."""
        if now > self._terminate_at and self._kill_at == _NEVER:
            self._kill_at = now + SECONDS
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if now > self._kill_at:
            self._kill_at = now + SECONDS
            self.kill()

    def kill(self) -> None:
        """Leave nothing of it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Kill it, and read no more."""
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
