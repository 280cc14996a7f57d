"""Messages between the launcher and the supervisors: frames on one TCP connection per rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

MESSAGE, ATTACHMENT, STDOUT, STDERR = b"J", b"A", b"1", b"2"
_HEADER = struct.Struct(">cI")
_LARGEST = 1 << 26  # more than that is no frame of ours
_PIECE = 1 << 20
_DEAD_SECONDS = 45
#: Of struct tcp_info: how often the same data was sent again in vain, how often in vain it was asked whether more may
#: come, and ms since anything was acknowledged.
_SILENCE = struct.Struct("=2xBB52xI")


class Frame(NamedTuple):
    """A message, or what a rank has printed."""

    kind: bytes
    data: bytes

    @property
    def message(self) -> dict[str, Any]:
        content = json.loads(self.data)
        if not isinstance(content, dict):
            raise ValueError("not a message")
        return content


class Channel(asyncio.Protocol):
    """One end of a connection.

    Sending never waits. What the connection does not take is kept, and who sends much stops when told to.

    Attributes:
        heard: gets the frames.
        lost: is called at the end of the connection, whoever has ended it.
        congested: is told whether too much is kept.
    """

    def __init__(
        self,
        heard: Callable[[Frame], None],
        lost: Callable[[], None],
        congested: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.heard, self.lost, self.congested = heard, lost, congested
        self._received = bytearray()
        self._is_heard = True
        self._transport: asyncio.Transport | None = None

    async def open(self, connection: socket.socket) -> None:
        """Take over a connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_dead_node(connection)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, connection)

    def send(self, kind: bytes, data: bytes) -> None:
        """Send a frame; none without data, and to nobody if the other side is gone."""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEADER.pack(kind, len(data)) + data)

    def say(self, **message: Any) -> None:
        self.send(MESSAGE, json.dumps(message).encode())

    def is_silent(self) -> bool:
        """Return whether the other kernel has not answered for long, though it was asked: the node is cut off or dead.

        The kernel itself would wait for a quarter of an hour. Keepalive does not run while data is under way that
        nobody has acknowledged, and TCP_USER_TIMEOUT would also end the connection to a launcher that was stopped
        (Ctrl-Z), whose kernel answers, but takes nothing.
        """
        assert self._transport is not None
        connection = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENCE.size)
            repeated, asked, last_answer = _SILENCE.unpack(info)
            # A receiver that is full answers each question, at most two minutes after the one before.
            return bool((repeated or asked > 1) and last_answer > 1000 * _DEAD_SECONDS)
        return False

    def attach(self, data: bytes) -> None:
        """Send what may be long, ahead of a MESSAGE."""
        for start in range(0, len(data), _PIECE):
            self.send(ATTACHMENT, data[start : start + _PIECE])

    def close(self) -> None:
        """Close this end once all is sent."""
        self._is_heard = False
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        """Close this end at once."""
        self._is_heard = False
        if self._transport is not None:
            self._transport.abort()

    # ---- what the loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for frame in self._complete():
                self.heard(frame)
        except Exception as error:  # asyncio would take an OSError for the connection's, and say nothing
            context = {"message": "a frame that could not be handled", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def eof_received(self) -> None:
        """The other side is gone, and nobody is there to wait for what is still to be sent."""
        self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost()

    def pause_writing(self) -> None:
        """The other side does not read as fast as this one sends."""
        self.congested(True)

    def resume_writing(self) -> None:
        self.congested(False)

    def _complete(self) -> Iterator[Frame]:
        while self._is_heard and len(self._received) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._received)
            if length > _LARGEST:
                self.drop()  # this is not our protocol
                return
            end = _HEADER.size + length
            if len(self._received) < end:
                return
            frame = Frame(kind, bytes(self._received[_HEADER.size : end]))
            del self._received[:end]
            yield frame


def end_unanswered(connection: socket.socket) -> None:
    """Have what was sent and not acknowledged for 45 s end a connection, as silence does; it would be 15 minutes.

    For the launcher, whose orders are few. A supervisor that sends output must be able to wait for a launcher that
    was stopped with Ctrl-Z: the kernel counts its full buffer as unanswered too.
    """
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_SECONDS * 1000)


def _notice_a_dead_node(connection: socket.socket) -> None:
    """After 45 s without an answer from the other kernel. A node that vanishes closes no connection."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
