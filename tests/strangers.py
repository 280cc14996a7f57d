"""What may come to a port that strangers can reach. Each keeps its connections open, for the caller to close."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

_FLOOD_BYTES = 1 << 30
_PIECE = b"x" * (1 << 20)
MANY = 2000


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def silent(port: int) -> list[socket.socket]:
    """Some say nothing."""
    return [_connect(port) for _ in range(5)]


def garbage(port: int) -> list[socket.socket]:
    """Some say what no protocol has, some the beginning of something long, some go in the middle of a word."""
    connections = silent(port)
    said = (os.urandom(1000), b"\0" * 7, b"J\xff\xff\xff\xff", b"0 1\n", b"{}")
    for connection, words in zip(connections, said, strict=True):
        with contextlib.suppress(OSError):
            connection.sendall(words)
    connections.pop().close()
    return connections


def endless_line(port: int) -> list[socket.socket]:
    """1 GB without a newline, or as much as is taken."""
    connection = _connect(port)
    with contextlib.suppress(OSError):
        for _ in range(_FLOOD_BYTES // len(_PIECE)):
            connection.sendall(_PIECE)
    return [connection]


def many(port: int) -> list[socket.socket]:
    """More connections than the server has descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, MANY + 500)), hard))
    connections: list[socket.socket] = []
    for _ in range(MANY):
        connection = socket.socket()
        connection.setblocking(False)  # those that find the queue full wait in it, as an attacker does not
        connection.connect_ex(("127.0.0.1", port))
        connections.append(connection)
    return connections


ATTACKS: dict[str, Callable[[int], list[socket.socket]]] = {
    attack.__name__: attack for attack in (silent, garbage, endless_line, many)
}


def peak_memory(process: int) -> int:
    """The most bytes that a process has had in memory."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def is_listening(process: int) -> bool:
    """Whether a process has a listening TCP socket."""
    return any(each.status == psutil.CONN_LISTEN for each in psutil.Process(process).net_connections("tcp"))
