"""Connections to the sockets of this node's ranks. Imports neither torch nor MPI."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence

from . import files
from .files import RankSocket

#: For ranks of this node, which answer from memory.
MEMORY_SECONDS = 2.0
_PIECE = 1 << 16
_STATES = {
    "T": "stopped (SIGSTOP, or Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "in the kernel (disk, swap, or a file system that does not answer)",
    "Z": "ended",
    "": "ended, or in another container",
}


def ask(sockets: Sequence[RankSocket], request: str, seconds: float) -> dict[int, str]:
    """Ask ranks of this node at the same time.

    Returns:
        The answers, by rank, of those that have answered to the end.
    """
    until = time.monotonic() + seconds
    answers: dict[int, str] = {}
    heard: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for each in sockets:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            try:
                with files.address_of(each.path) as address:
                    connection.connect(address)
                connection.send(f"{request}\n".encode())
            except OSError:  # gone, or stopped for so long that callers stand in line
                continue
            heard[each.rank] = b""
            selector.register(connection, selectors.EVENT_READ, each.rank)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    piece = key.fileobj.recv(_PIECE)
                except OSError:
                    piece = b""
                heard[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
                    if heard[key.data]:
                        answers[key.data] = heard[key.data].decode(errors="replace")
    return answers


def ask_patiently(sockets: Sequence[RankSocket], request: str, seconds: float, patience: float) -> dict[int, str]:
    """As :func:`ask`; those that are silent though they run are asked once more, with more time.

    A rank answers one caller at a time, and may be busy with what another one has asked it.
    """
    answers = ask(sockets, request, seconds)
    silent = [each for each in sockets if each.rank not in answers and not state_of(each.pid)]
    return answers | (ask(silent, request, patience) if silent else {})


def state_of(pid: int) -> str:
    """In words why a process may not answer; empty: it looks as if it could."""
    return _STATES.get(files.state_of(pid), "")


def why_silent(asked: RankSocket) -> str:
    reason = state_of(asked.pid) or "the thread that answers gets no core, or the process is in swap"
    return f"does not answer: process {asked.pid}: {reason}"
