"""The caller's side of connections between processes of one job; ``listener.py`` is the other one.

Blocking sockets: who calls has nothing else to do yet. Imports neither torch, MPI nor asyncio.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Sequence

CHALLENGE_BYTES = PROOF_BYTES = 32
LISTENER, CALLER = b"listener", b"caller"
_LISTENER_SECONDS = 5.0  # for whoever listens to prove itself, and for a connection to be made
_RETRY_SECONDS = 0.1


def proof(secret: str, role: bytes, address: Sequence[object], challenges: bytes) -> bytes:
    """Return a proof that one in this role, on a connection to this address, knows the secret."""
    called = f" {address[0]} {address[1]} ".encode()
    return hmac.digest(secret.encode(), role + called + challenges, "sha256")


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
    connection = socket.create_connection((address, port), timeout=_LISTENER_SECONDS)
    try:
        _prove(connection, secret)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _prove(connection: socket.socket, secret: str) -> None:
    until = time.monotonic() + _LISTENER_SECONDS
    called, own = connection.getpeername(), secrets.token_bytes(CHALLENGE_BYTES)
    challenges = _receive(connection, CHALLENGE_BYTES, until) + own
    connection.sendall(own + proof(secret, CALLER, called, challenges))
    answer = _receive(connection, PROOF_BYTES, until)
    if not hmac.compare_digest(answer, proof(secret, LISTENER, called, challenges)):
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
