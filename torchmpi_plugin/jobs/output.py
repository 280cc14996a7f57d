"""The ranks' output: cut into lines where it is read, prefixed with the rank where it is shown.

It is written without waiting for its reader, who may be slow, or stuck.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, BinaryIO, TextIO

from .loop import Alarm

_FLUSH_BYTES = 1 << 16
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
# Above the first the ranks are asked to wait, below the second to go on.
_FULL_BYTES, _LOW_BYTES = 8 << 20, 4 << 20
_DROP_BYTES = 64 << 20  # once the job is being ended nobody is asked to wait
_PIECE = 1 << 16


class Writer:
    """Writes in a thread of its own, in the order of ``write``; for all streams that lead to one place.

    Attributes:
        is_patient: nothing is dropped, however much waits.
        unread: how many bytes were dropped.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[TextIO, str] | None] = SimpleQueue()
        # A daemon: a stuck reader must not keep this process from ending.
        self._thread = threading.Thread(target=self._work, name="mpiplus-writer", daemon=True)
        self._error: Exception | None = None
        self._given = self._written = 0  # each is counted by one thread
        self.is_patient = True
        self.unread = 0

    @property
    def waiting(self) -> int:
        return self._given - self._written

    def write(self, stream: TextIO, text: str) -> None:
        """Have text written; an OSError: the reader of what came before has gone away."""
        self.check()
        if not self.is_patient and self.waiting > _DROP_BYTES:
            self.unread += len(text)
            return
        if self._thread.ident is None:
            self._thread.start()
        self._given += len(text)
        self._queue.put((stream, text))

    def is_full(self, was_full: bool) -> bool:
        """Return whether the ranks should wait, as they did, or did not, until now."""
        return self.waiting > (_LOW_BYTES if was_full else _FULL_BYTES)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self, seconds: float = 0.0) -> None:
        """No more is to come; wait so long until the rest is written."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                _put(*item)
                self._written += len(item[1])
        except Exception as error:
            self._error = error


def destination(stream: TextIO) -> object:
    """Equal for two streams that lead to one place: what goes there must keep its order."""
    descriptor = _descriptor(stream)
    if descriptor is None:
        return id(stream)
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def say(stream: TextIO, text: str, seconds: float) -> None:
    """Write last words, and leave them behind if nobody takes them in this time."""
    writer = Writer()
    writer.write(stream, text)
    writer.close(seconds)


def _descriptor(stream: TextIO) -> int | None:
    """Of a file, a pipe or a terminal; None where something else is behind the stream."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw.fileno() if isinstance(raw, io.FileIO) and not raw.closed else None


def _put(stream: TextIO, text: str) -> None:
    descriptor = _descriptor(stream)
    if descriptor is None:
        stream.write(text)
        stream.flush()
        return
    # Past Python's buffer, whose lock a stuck write would hold, and Python waits for that lock when it exits.
    stream.flush()
    data = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data[:_PIECE]) :]
        except BlockingIOError:  # whoever shares the terminal has made it so
            select.select([], [descriptor], [])


def without_torchs_prefix(rank: int, data: bytes) -> bytes:
    """Lines without the ``[rank2]: `` that torch puts in front of tracebacks."""
    return re.sub(rb"(?m)^\[rank%d\]: ?" % rank, b"", data)


class Stream:
    """A program's stdout or stderr, sent on in whole lines, so that those of several ranks do not mix.

    Attributes:
        file: gets it too.
        quiet: to be set when nothing more comes for now, to send what is no complete line as well.
    """

    def __init__(self, pipe: IO[bytes], file: BinaryIO | None, send: Callable[[bytes], None]) -> None:
        self.pipe, self.file = pipe, file
        self.quiet = Alarm(self.flush)
        self.unfinished = b""
        self._send = send

    def feed(self, data: bytes) -> None:
        """Send the lines that are complete now; a progress bar's carriage return ends a line too."""
        data = self.unfinished + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _FLUSH_BYTES:
            end = len(data)
        self.unfinished = data[end:]
        self._send(data[:end])

    def flush(self) -> None:
        """Send what is not a line, or not yet: a prompt, say."""
        self._send(self.unfinished)
        self.unfinished = b""


class Terminal:
    """The place where the output of all ranks comes together."""

    def __init__(
        self, stream: TextIO, prefix: bool, colour: bool, writer: Writer | None = None, attempt: int = 0
    ) -> None:
        self._stream = stream
        self.writer = writer or Writer()
        self.has_prefix = prefix
        self._attempt = f", restart {attempt}" if attempt else ""
        self._colour = colour
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._unfinished: int | None = None

    def show(self, rank: int, data: bytes) -> None:
        decoder = self._decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("replace"))
        lines = _LINE.findall(decoder.decode(data))
        if lines:
            continues = self._unfinished == rank
            start = "\n" if self._unfinished is not None and not continues else ""
            name = self._name(rank)
            self.writer.write(self._stream, start + ("" if continues else name) + name.join(lines))
            self._unfinished = None if lines[-1].endswith(("\n", "\r")) else rank

    def _name(self, rank: int) -> str:
        if not self.has_prefix:
            return ""
        name = f"[rank {rank}{self._attempt}]"
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m " if self._colour else f"{name} "

    def say(self, text: str) -> None:
        """Have lines of the launcher's own written."""
        if text:
            self.finish()
            self.writer.write(self._stream, text)

    def finish(self) -> None:
        """End a line that a rank has left open."""
        if self._unfinished is not None:
            self.writer.write(self._stream, "\n")
            self._unfinished = None
