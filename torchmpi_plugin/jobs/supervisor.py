"""Runs one rank's program: passes its output and its ending to the launcher, and signals to it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from .. import settings
from .channel import MESSAGE, STDERR, STDOUT, Channel, ClosedError, Frame
from .formats import expand
from .output import LineBuffer
from .signals import FORWARDED

# How long a program gets to end by itself after mpirun has killed the guard. The one that called MPI_Abort does.
_ABORT_SECONDS = 0.3
_DRAIN_SECONDS = 1.0  # a grandchild may hold the pipes open for ever
_QUIET_SECONDS = 0.3  # after that, what is no complete line is shown as well
_CANNOT_START = 127


class Stream:
    """The program's stdout or stderr."""

    def __init__(self, kind: bytes, file: BinaryIO | None) -> None:
        self.kind = kind
        self.file = file
        self.lines = LineBuffer()
        self.last = 0.0


class Supervisor:
    """Runs the program of one rank.

    Args:
        channel: to the launcher.
        job: what to run, where, and what to do with the output; see ``job.orders``.
        guard_gone: a pipe that ends when the guard does.
        early: what came together with the job.
    """

    def __init__(self, channel: Channel, job: Mapping[str, Any], guard_gone: int, early: Sequence[Frame] = ()) -> None:
        self._channel: Channel | None = channel
        self._job = job
        self._early = early
        self._guard_gone = guard_gone
        self._selector = selectors.DefaultSelector()
        self._child: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, Stream] = {}
        self._code: int | None = None
        self._ended_by_mpi = False
        self._dismissed = False
        self._held = False
        self._drain_until = self._kill_at = float("inf")

    def run(self) -> int:
        """Run the program to its end; its exit code as the shell has it."""
        self._watch_signals()
        self._selector.register(self._guard_gone, selectors.EVENT_READ, self._guard_ended)
        if self._channel:
            self._selector.register(self._channel, selectors.EVENT_READ, self._ordered)
        try:
            self._start()
        except OSError as error:
            self._cannot_start(error)
        self._obey(self._early)
        while self._code is None or self._streams or not self._dismissed:
            for key, _ in self._selector.select(0.1):
                key.data()
            self._look_at_the_clock()
        return self._code

    # ---- the program ----

    def _start(self) -> None:
        os.chdir(self._job["cwd"])
        files = self._open_files()
        self._child = subprocess.Popen(
            self._job["command"],
            env=_environment(self._job),
            # mpirun's own goes to rank 0; that of the others gives neither data nor its end.
            stdin=None if self._job["fields"]["rank"] == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # PMI_FD, and what is attached
            preexec_fn=os.setpgrp,  # noqa: PLW1509 (one thread): signals go to all that the program starts
        )
        if self._job["attachment"] is not None:
            os.close(self._job["attachment"])
        for kind, pipe, file in zip((STDOUT, STDERR), (self._child.stdout, self._child.stderr), files, strict=True):
            assert pipe is not None
            descriptor = pipe.fileno()
            self._streams[descriptor] = Stream(kind, file)
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, partial(self._read, descriptor))

    def _open_files(self) -> list[BinaryIO | None]:
        opened: dict[str, BinaryIO] = {}
        for format_ in (self._job["stdout"], self._job["stderr"]):
            if format_ and format_ not in opened:
                path = Path(expand(format_, self._job["fields"]))
                path.parent.mkdir(parents=True, exist_ok=True)
                opened[format_] = path.open("wb", buffering=0)
        return [opened.get(format_ or "") for format_ in (self._job["stdout"], self._job["stderr"])]

    def _cannot_start(self, error: OSError) -> None:
        text = f"mpiplus run: cannot start on host {socket.gethostname()}: {error.strerror}: {error.filename}\n"
        self._send(STDERR, text.encode())
        self._ended(_CANNOT_START)

    def _ended(self, status: int) -> None:
        """Tell it at once, as who was first counts; what is still in the pipes comes after it."""
        self._code = status if status >= 0 else 128 - status
        if not self._held:
            self._drain_until = time.monotonic() + _DRAIN_SECONDS
        self._say(event="ended", code=self._code, signal=max(0, -status), by_mpi=self._ended_by_mpi)
        if self._code:
            self._signal(signal.SIGKILL)  # what the program has started
        if not self._streams:
            self._all_told()

    def _all_told(self) -> None:
        self._say(event="told")
        if self._channel is None:
            self._dismissed = True

    def _signal(self, number: int) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, number)

    # ---- output ----

    def _read(self, descriptor: int) -> None:
        if self._held:
            return  # since the loop's last look
        stream = self._streams[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        stream.last = time.monotonic()
        if not data:
            self._close(descriptor)
            return
        if stream.file is not None:
            try:
                stream.file.write(data)
            except OSError as error:
                stream.file = None
                self._send(STDERR, f"mpiplus run: no more output in the file: {error}\n".encode())
        self._send(stream.kind, stream.lines.feed(data))

    def _close(self, descriptor: int) -> None:
        stream = self._streams.pop(descriptor)
        self._selector.unregister(descriptor)
        self._send(stream.kind, stream.lines.flush())
        if self._code is not None and not self._streams:
            self._all_told()

    # ---- the launcher ----

    def _send(self, kind: bytes, data: bytes) -> None:
        if self._channel is None or not data:
            return
        try:
            self._channel.send(kind, data)
        except ClosedError:
            self._launcher_lost()

    def _say(self, **message: Any) -> None:
        if self._channel is not None:
            try:
                self._channel.say(**message)
            except ClosedError:
                self._launcher_lost()

    def _ordered(self) -> None:
        if self._channel is None:
            return
        try:
            frames = self._channel.receive()
        except ClosedError:
            self._launcher_lost()
            return
        self._obey(frames)

    def _obey(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.kind != MESSAGE:
                continue
            order = frame.message
            if "signal" in order and self._code is None:
                self._signal(order["signal"])
            elif "hold" in order:
                self._hold(order["hold"])
            elif "dismissed" in order:
                self._dismissed = True

    def _hold(self, held: bool) -> None:
        """Leave the program's output in its pipes, which stops it at its next print, or go on to read it."""
        if held == self._held:
            return
        self._held = held
        for descriptor, stream in self._streams.items():
            if held:
                self._selector.unregister(descriptor)
                stream.last = float("inf")  # a line that is cut by the hold is not one without an end
            else:
                stream.last = time.monotonic()
                self._selector.register(descriptor, selectors.EVENT_READ, partial(self._read, descriptor))
        if self._code is not None:
            self._drain_until = float("inf") if held else time.monotonic() + _DRAIN_SECONDS

    def _launcher_lost(self) -> None:
        """It was killed, or its host is cut off. Nobody will read any more; end the program."""
        self._hold(False)
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
        self._channel = None
        self._dismissed = True
        if self._code is None:
            self._signal(signal.SIGTERM)
            self._kill_at = min(self._kill_at, time.monotonic() + self._job["grace"])

    # ---- what mpirun does ----

    def _watch_signals(self) -> None:
        receive, send = socket.socketpair()
        for end in (receive, send):
            end.setblocking(False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        self._wakeup = send
        self._selector.register(receive, selectors.EVENT_READ, lambda: self._signalled(receive.recv(4096)))

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD and self._code is None:
                self._ended_by_mpi |= number in (signal.SIGTERM, signal.SIGINT)
                self._signal(number)

    def _guard_ended(self) -> None:
        self._selector.unregister(self._guard_gone)
        self._kill_at = min(self._kill_at, time.monotonic() + _ABORT_SECONDS)

    # ---- time ----

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._code is None and self._child is not None and (status := self._child.poll()) is not None:
            self._ended(status)
        if self._code is None and now > self._kill_at:
            self._kill_at = float("inf")
            self._ended_by_mpi = True
            self._signal(signal.SIGKILL)
        for descriptor, stream in list(self._streams.items()):
            if now > self._drain_until:
                self._close(descriptor)
            elif stream.lines and now > stream.last + _QUIET_SECONDS:
                self._send(stream.kind, stream.lines.flush())


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    """The rank's own environment, what the launcher's has besides, and what the job says of this rank."""
    attached = {} if job["attachment"] is None else {settings.ATTACHMENT: str(job["attachment"])}
    return {**job["defaults"], **job["inherited"], **os.environ, **job["own"], **attached}
