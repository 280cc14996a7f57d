"""Connections between processes of one job, on ports that strangers can reach.

Who listens and who calls prove to each other that they know the job's secret, by HMACs of random challenges, before
either believes a word. The secret itself is not sent, and no proof can be used twice, on the other side, or through a
third party that passes it on: it is bound to the address that was called. What follows on the connection is neither
encrypted nor signed. Imports neither torch nor MPI.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence

_CHALLENGE_BYTES = _PROOF_BYTES = 32
_ANSWER_BYTES = _CHALLENGE_BYTES + _PROOF_BYTES
_CALLER_SECONDS = 10.0  # for a caller to prove itself
_HOST_SECONDS = 5.0  # for whoever listens to do so, and for a connection to be made
_RETRY_SECONDS = 0.1
# How many connections that have proved nothing there may be, beside those that are expected.
_SPARE = 64
_OTHER_DESCRIPTORS = 32
_PAUSE_SECONDS = 0.5
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _proof(secret: str, role: bytes, address: Sequence[object], challenges: bytes) -> bytes:
    called = f" {address[0]} {address[1]} ".encode()
    return hmac.digest(secret.encode(), role + called + challenges, "sha256")


class Caller:
    """A connection that has proved nothing yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + _CALLER_SECONDS
        self.challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self.answer = b""


class Reception:
    """Listens, and hands over the connections of those who know the secret.

    Strangers cost a bounded number of descriptors, 64 bytes each, for some seconds. Where there are too many of them
    the oldest has to go: one who knows the secret needs a moment only, and calls again where that was too long.

    Args:
        selector: of the caller's loop, which calls the ``data`` of the keys that are ready.
        secret: of the job.
        address: to listen on; empty: on all interfaces.
        expected: how many are to come.
        welcome: what to do with a connection whose other side knows the secret.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: str,
        address: str,
        expected: int,
        welcome: Callable[[socket.socket], None],
    ) -> None:
        self._selector = selector
        self._secret = secret
        self._limit = expected + _SPARE
        _allow_descriptors(self._limit + _OTHER_DESCRIPTORS)
        self._welcome = welcome
        self._callers: dict[Caller, None] = {}  # the oldest first
        self._listening = socket.create_server((address, 0), backlog=1024)
        self._listening.setblocking(False)
        self._resume_at: float | None = None
        self._is_open = True
        self.port = int(self._listening.getsockname()[1])
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def look_at_the_clock(self) -> None:
        """Turn away who has taken too long. To be called by the loop now and then."""
        now = time.monotonic()
        for caller in [caller for caller in self._callers if now > caller.until]:
            self._turn_away(caller)
        if self._resume_at is not None and now > self._resume_at:
            self._resume_at = None
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Everybody has come: nobody else can, from now on."""
        if not self._is_open:
            return
        self._is_open = False
        for caller in list(self._callers):
            self._turn_away(caller)
        if self._resume_at is None:
            self._selector.unregister(self._listening)
        self._resume_at = None
        self._listening.close()

    def _accept(self) -> None:
        if not self._is_open:
            return
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room()
            return
        caller = Caller(connection)
        connection.setblocking(False)
        self._callers[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(caller))
        if len(self._callers) > self._limit:
            self._turn_away(next(iter(self._callers)))
        with contextlib.suppress(OSError):  # shows when it is read
            connection.send(caller.challenge)

    def _make_room(self) -> None:
        """No descriptor is free. The loop must not spin on a listener that stays ready."""
        if self._callers:
            self._turn_away(next(iter(self._callers)))
        else:
            self._selector.unregister(self._listening)
            self._resume_at = time.monotonic() + _PAUSE_SECONDS

    def _hear(self, caller: Caller) -> None:
        if caller not in self._callers:
            return  # turned away since the loop's last look
        try:
            data = caller.connection.recv(_ANSWER_BYTES - len(caller.answer))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.answer += data
        if not data:
            self._turn_away(caller)
        elif len(caller.answer) == _ANSWER_BYTES:
            self._judge(caller)

    def _judge(self, caller: Caller) -> None:
        own, proof = caller.answer[:_CHALLENGE_BYTES], caller.answer[_CHALLENGE_BYTES:]
        called, challenges = caller.connection.getsockname(), caller.challenge + own
        if not hmac.compare_digest(proof, _proof(self._secret, b"caller", called, challenges)):
            self._turn_away(caller)
            return
        try:
            caller.connection.send(_proof(self._secret, b"host", called, challenges))
        except OSError:
            self._turn_away(caller)
            return
        del self._callers[caller]
        self._selector.unregister(caller.connection)
        caller.connection.setblocking(True)
        self._welcome(caller.connection)

    def _turn_away(self, caller: Caller) -> None:
        del self._callers[caller]
        self._selector.unregister(caller.connection)
        caller.connection.close()


def _allow_descriptors(count: int) -> None:
    """As far as the system lets us: 1,024 is a usual limit, and a small one for a large job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def call(addresses: Sequence[str], port: int, secret: str, seconds: float) -> socket.socket:
    """Connect to the first of some addresses where somebody listens who knows the secret.

    Args:
        addresses: where whoever listens may be found, the likeliest first.
        port: the same on all.
        secret: of the job.
        seconds: how long to go on trying; each address is tried once at least.

    Returns:
        A blocking connection on which nothing has been read but proofs.

    Raises:
        ConnectionError: there is nobody such; the message has the reason for each address.
    """
    until = time.monotonic() + seconds
    while True:
        reasons = []
        for address in addresses:
            try:
                return _call(address, port, secret)
            except OSError as error:
                reasons.append(f"{address}: {error}")
        if time.monotonic() > until:
            raise ConnectionError("; ".join(reasons))
        time.sleep(_RETRY_SECONDS)


def _call(address: str, port: int, secret: str) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_HOST_SECONDS)
    try:
        _prove(connection, secret)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _prove(connection: socket.socket, secret: str) -> None:
    until = time.monotonic() + _HOST_SECONDS
    called, own = connection.getpeername(), secrets.token_bytes(_CHALLENGE_BYTES)
    challenges = _receive(connection, _CHALLENGE_BYTES, until) + own
    connection.sendall(own + _proof(secret, b"caller", called, challenges))
    proof = _receive(connection, _PROOF_BYTES, until)
    if not hmac.compare_digest(proof, _proof(secret, b"host", called, challenges)):
        raise ConnectionError("a stranger listens there, who does not know the job's secret")


def _receive(connection: socket.socket, length: int, until: float) -> bytes:
    """Exactly so many bytes: what comes after them is not ours to read."""
    data = b""
    while len(data) < length:
        connection.settimeout(max(0.001, until - time.monotonic()))
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("turned away")
        data += piece
    return data
