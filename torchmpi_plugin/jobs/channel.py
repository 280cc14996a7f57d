"""What the launcher and the supervisors say to each other: frames on one TCP connection per rank."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any, NamedTuple

MESSAGE, ATTACHMENT, STDOUT, STDERR = b"J", b"A", b"1", b"2"
_HEADER = struct.Struct(">cI")
_LARGEST = 1 << 26  # more than that is no frame of ours
_CHUNK = 1 << 16
_PIECE = 1 << 20
_DEAD_SECONDS = 45


class Frame(NamedTuple):
    """A message, or what a rank has printed."""

    kind: bytes
    data: bytes

    @property
    def message(self) -> dict[str, Any]:
        """The content of a MESSAGE."""
        content = json.loads(self.data)
        if not isinstance(content, dict):
            raise ValueError("not a message")
        return content


class ClosedError(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of a connection. Sending blocks; receiving takes what is there."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_dead_host(connection)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, kind: bytes, data: bytes) -> None:
        """Raises ClosedError where nobody listens any more."""
        try:
            self.socket.sendall(_HEADER.pack(kind, len(data)) + data)
        except OSError as error:
            raise ClosedError(str(error)) from error

    def say(self, **message: Any) -> None:
        """Send a MESSAGE."""
        self.send(MESSAGE, json.dumps(message).encode())

    def attach(self, data: bytes) -> None:
        """Send what may be long, ahead of a MESSAGE."""
        for start in range(0, len(data), _PIECE):
            self.send(ATTACHMENT, data[start : start + _PIECE])

    def receive(self) -> list[Frame]:
        """The frames that are complete after one read, perhaps none.

        Raises:
            ClosedError: the end of the connection.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError as error:
            raise ClosedError(str(error)) from error
        if not data:
            raise ClosedError("closed")
        self._received += data
        return self._complete()

    def _complete(self) -> list[Frame]:
        frames = []
        while len(self._received) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._received)
            if length > _LARGEST:
                raise ClosedError("this is not the launcher's protocol")
            end = _HEADER.size + length
            if len(self._received) < end:
                break
            frames.append(Frame(kind, bytes(self._received[_HEADER.size : end])))
            del self._received[:end]
        return frames

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def end_unanswered(connection: socket.socket) -> None:
    """Have what was sent and not acknowledged for 45 s end a connection, as silence does; it would be 15 minutes.

    For the launcher, whose orders are few. A supervisor that sends output must be able to wait for a launcher that
    was stopped with Ctrl-Z: the kernel counts its full buffer as unanswered too.
    """
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_SECONDS * 1000)


def _notice_a_dead_host(connection: socket.socket) -> None:
    """After 45 s without an answer from the other kernel. A host that vanishes closes no connection."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
