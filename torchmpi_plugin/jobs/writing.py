"""Writing to a reader who may be slow, or stuck, without waiting for it."""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from typing import TextIO

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
        self._queue: deque[tuple[TextIO, str]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._closed = False
        self.waiting = 0
        self.is_patient = True
        self.unread = 0

    def write(self, stream: TextIO, text: str) -> None:
        """Have text written.

        Raises:
            OSError: the reader of what came before has gone away.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self.is_patient and self.waiting > _DROP_BYTES:
                self.unread += len(text)
                return
            self._queue.append((stream, text))
            self.waiting += len(text)
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: a stuck reader must not keep this process from ending.
            self._thread = threading.Thread(target=self._work, name="mpiplus-writer", daemon=True)
            self._thread.start()

    def is_full(self, was_full: bool) -> bool:
        """Return whether the ranks should wait, as they did, or did not, until now."""
        return self.waiting > (_LOW_BYTES if was_full else _FULL_BYTES)

    def check(self) -> None:
        """Raise the error, if any, that writing has ended with."""
        if self._error is not None:
            raise self._error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting or self._error is not None, seconds)

    def close(self) -> None:
        """No more is to come; the thread ends once the rest is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                stream, text = self._queue.popleft()
            try:
                _put(stream, text)
            except Exception as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self.waiting -= len(text)
                self._changed.notify_all()


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
    writer.wait(seconds)
    writer.close()


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
