"""Connections between processes of one job, on ports that strangers can reach: whoever listens.

Who listens and who calls (``calling.py``) prove to each other that they know the job's secret, by HMACs of random
challenges, before either believes a word. The secret itself is not sent, and no proof can be used twice, on the other
side, or through a third party that passes it on: it is bound to the address that was called. What follows on the
connection is neither encrypted nor signed. Imports neither torch nor MPI.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
import socket
from collections.abc import Callable, Coroutine

from . import processes
from .calling import CALLER, CHALLENGE_BYTES, LISTENER, PROOF_BYTES, proof

_CALLER_SECONDS = 10.0  # for a caller to prove itself
# How many connections that have proved nothing there may be, beside those that are expected.
_SPARE = 64
_PAUSE_SECONDS = 0.5
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Welcome = Callable[[socket.socket], Coroutine[object, object, None]]


class Listener:
    """Listens in the running loop, and hands over the connections of those who know the secret.

    Strangers cost a bounded number of descriptors, 64 bytes each, for some seconds. Where there are too many of them
    the oldest has to go: one who knows the secret needs a moment only, and calls again where that was too long.
    Hence the loop's calls for sockets, and not asyncio's servers and streams: those accept all who wait before
    anybody can be turned away, and read 256 KiB at once.

    Args:
        secret: of the job.
        address: to listen on; empty: on all interfaces.
        expected: how many are to come.
        welcome: what to do, in a task of its own, with a connection whose other side knows the secret.
    """

    def __init__(self, secret: str, address: str, expected: int, welcome: Welcome) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self._limit = expected + _SPARE
        processes.allow_connections(self._limit)
        self._welcome = welcome
        self._callers: dict[socket.socket, asyncio.Task[None]] = {}  # who have proved nothing, the oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself would let go of them
        self._listening = socket.create_server((address, 0), backlog=1024)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self._accepting = self._begin(self._accept())

    def close(self) -> None:
        """Everybody has come: nobody else can, from now on."""
        if self._listening.fileno() >= 0:
            self._accepting.cancel()
            self._loop.remove_reader(self._listening)
            self._listening.close()
            for caller in list(self._callers):
                self._turn_away(caller)

    def _begin(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        while True:
            await asyncio.sleep(0)  # for those who were accepted to be heard
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in _NO_ROOM and self._callers:
                    self._turn_away(next(iter(self._callers)))
                elif error.errno in _NO_ROOM:
                    await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._callers[connection] = self._begin(self._hear(connection))
            if len(self._callers) > self._limit:
                self._turn_away(next(iter(self._callers)))

    async def _hear(self, connection: socket.socket) -> None:
        deadline = self._loop.call_later(_CALLER_SECONDS, self._turn_away, connection)
        try:
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            await self._loop.sock_sendall(connection, challenge)
            own = await self._receive(connection, CHALLENGE_BYTES)
            answer = await self._receive(connection, PROOF_BYTES)
            called, challenges = connection.getsockname(), challenge + own
            if not hmac.compare_digest(answer, proof(self._secret, CALLER, called, challenges)):
                raise ConnectionError("a stranger")
            # Before it has the proof: it does not call again then, and strangers must not push it out.
            del self._callers[connection]
            await self._loop.sock_sendall(connection, proof(self._secret, LISTENER, called, challenges))
        except OSError:
            self._callers.pop(connection, None)
            connection.close()
            return
        finally:
            deadline.cancel()
        await self._welcome(connection)

    async def _receive(self, connection: socket.socket, length: int) -> bytes:
        """Exactly so many bytes: what comes after them is not ours to read."""
        data = b""
        while len(data) < length:
            piece = await self._loop.sock_recv(connection, length - len(data))
            if not piece:
                raise ConnectionError("gone")
            data += piece
        return data

    def _turn_away(self, connection: socket.socket) -> None:
        """At once, for the sake of its descriptor, which whoever comes next may get: the loop must not look at it."""
        if caller := self._callers.pop(connection, None):
            self._loop.remove_reader(connection)
            self._loop.remove_writer(connection)
            connection.close()
            caller.cancel()
