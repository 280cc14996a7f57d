"""mpirun as a process: what it says itself, and how it is made to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from .loop import Alarm

SECONDS = 5.0  # for mpirun to end once its ranks have, and again once it is told to
_NOISE_BYTES = 1 << 16


class LauncherProcess(asyncio.SubprocessProtocol):
    """mpirun, started in a session of its own: Ctrl-C is for the job monitor to pass on.

    Attributes:
        code: how it ended, as the shell has it; None while it runs.
        noise: what it has said, or a supervisor that could not connect.
        is_quiet: it has ended, and no more is to come.
        is_late: it was told to end.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._exited = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None
        self._terminate, self._kill = Alarm(self._end), Alarm(self.kill)
        self.code: int | None = None
        self.noise = ""
        self.is_quiet = self.is_late = False

    async def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            *argv,
            env=environment,
            stdin=None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if len(self.noise) < _NOISE_BYTES:
            self.noise += data.decode(errors="replace")

    def process_exited(self) -> None:
        code = self._transport.get_returncode() if self._transport else None
        assert code is not None
        self.code = code if code >= 0 else 128 - code
        self._exited.set()
        self._changed()

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended, and so has what it said."""
        self.is_quiet = True
        self._changed()

    def end_in(self, seconds: float) -> None:
        """Set the time to tell it to end, unless that was to come earlier; it is killed some seconds later."""
        self._terminate.set(seconds)

    def _end(self) -> None:
        self.is_late = self.code is None
        self._kill.set(SECONDS)
        self._signal(os.kill, signal.SIGTERM)

    def _signal(self, send: Callable[[int, int], None], number: int) -> None:
        """Not through the transport, whose look at the process may take its exit code from asyncio's own wait."""
        if self.code is None and self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                send(self._transport.get_pid(), number)

    def kill(self) -> None:
        """Leave nothing of it."""
        self._signal(os.killpg, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it, and read no more."""
        self.kill()
        await self._exited.wait()
        assert self._transport is not None
        self._transport.close()
