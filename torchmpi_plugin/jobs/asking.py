"""What the ranks of running jobs tell about themselves: this node's on their sockets, others' through one of these."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..node import status_files
from ..node.status_files import RankSocket

#: For ranks on this node, which answer from memory; for stacks; for what takes their Python, or the job's store.
MEMORY_SECONDS, STACKS_SECONDS, PYTHON_SECONDS = 2.0, 5.0, 8.0
_PIECE = 1 << 16
_STATES = {
    "T": "stopped (SIGSTOP, or Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "in the kernel (disk, swap, or a file system that does not answer)",
    "Z": "ended",
    "": "ended",
}


@dataclass
class Rank:
    """What is known of a rank.

    Attributes:
        rank: its number in the world.
        answer: what it tells; None: nothing.
        problem: why it tells nothing.
        words: what it tells through the job's store in words; empty: it was asked on its socket.
    """

    rank: int
    answer: dict[str, Any] | None = None
    problem: str = ""
    words: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)


def ask(sockets: Sequence[RankSocket], request: str, seconds: float) -> dict[int, str]:
    """Ask ranks of this node at the same time.

    Args:
        sockets: theirs.
        request: one of those that c_src/group/status.c knows.
        seconds: for all answers.

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
                with status_files.address_of(each.path) as address:
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


def state_of(pid: int) -> str:
    """In words why a process may not answer; empty: it looks as if it could."""
    return _STATES.get(status_files.state_of(pid), "")


def ask_job(sockets: Sequence[RankSocket]) -> list[Rank]:
    """What all ranks of a job tell, those on other nodes too, by their numbers."""
    answers = ask(sockets, "status", MEMORY_SECONDS)
    found = {each.rank: _understood(each, answers.get(each.rank)) for each in sockets}
    size = max((int(rank.answer["world_size"]) for rank in found.values() if rank.answer), default=0)
    if size > len(found):
        found |= _ask_elsewhere(sockets, answers)
    for number in range(size):
        if number not in found:
            found[number] = Rank(
                number, problem="does not answer: on another node, which may be cut off, or it has ended"
            )
    return [found[number] for number in sorted(found)]


def _understood(asked: RankSocket, answer: str | None) -> Rank:
    if answer is None:
        reason = state_of(asked.pid) or "the thread that answers gets no core, or the process is in swap"
        return Rank(asked.rank, problem=f"does not answer: process {asked.pid}: {reason}")
    parsed = json.loads(answer)
    rank = Rank(asked.rank, parsed, groups=parsed["groups"])
    if state_of(asked.pid).startswith("stopped"):
        rank.problem = state_of(asked.pid)
    return rank


def _ask_elsewhere(sockets: Sequence[RankSocket], answered: dict[int, str]) -> dict[int, Rank]:
    """Through the job's store, by the first rank here whose Python has a moment for it."""
    for each in sockets:
        if each.rank not in answered:
            continue
        told = ask([each], "others", PYTHON_SECONDS).get(each.rank)
        if told:
            return {int(rank): _told(int(rank), answer) for rank, answer in json.loads(told).items()}
    return {}


def _told(rank: int, answer: str) -> Rank:
    words, _, status = [*answer.split("\n"), "", "", ""][:3]
    parsed = json.loads(status) if status else None
    return Rank(rank, parsed, words=words, groups=parsed["groups"] if parsed else [])
