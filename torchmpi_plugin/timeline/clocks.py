"""Offsets of other nodes' clocks from rank 0's: messages there and back, of which the fastest tells most."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any, NamedTuple

from ..mpi import nonblocking, runtime

#: Per node: so many messages there and back, then until one has told enough, for so long at the most. ns, seconds.
_ROUNDS, _ENOUGH_NS, _SECONDS = 100, 20_000, 0.5
#: After so long the other side is not there any more.
_LOST_SECONDS = 3.0
_POLL_SECONDS = 0.005
_END = -1


class Offset(NamedTuple):
    """A node's clock less rank 0's, when that said ``at``; in ns. It is wrong by ``error`` at most."""

    at: int
    offset: int
    error: int


def measure(store: Any, communicator: Any, when: str, seconds: float) -> dict[int, Offset]:
    """Called by all ranks that record: the first one of each other node and rank 0 exchange messages.

    Returns:
        On rank 0 what was found, by node; a node whose rank has not come within ``seconds`` is missing.

    Args:
        store: the world's, by which they find each other.
        communicator: the world's.
        when: makes the names of this measurement's keys.
    """
    comm, me = communicator.comm, communicator.comm.Get_rank()
    firsts = {communicator.node_of(rank): rank for rank in reversed(range(comm.Get_size()))}
    firsts.pop(communicator.node_of(0))
    until = time.monotonic() + seconds
    if me in firsts.values():
        store.set(key(when, "here", me), "")
        if _appears(store, key(when, "go", me), until):
            _answer(comm, communicator.clock_tag)
    found: dict[int, Offset] = {}
    while me == 0 and len(found) < len(firsts) and time.monotonic() < until:
        for node, rank in firsts.items():
            if node not in found and store.check([key(when, "here", rank)]):
                store.set(key(when, "go", rank), "")
                found[node] = _ask(comm, rank, communicator.clock_tag)
        time.sleep(_POLL_SECONDS)
    return found


def key(*parts: object) -> str:
    """Of the store."""
    return "/".join(["mpiplus/timeline", *map(str, parts)])


def _appears(store: Any, key: str, until: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _ask(comm: Any, rank: int, tag: int) -> Offset:
    until, best = time.monotonic() + _SECONDS, Offset(0, 0, 1 << 62)
    for number in itertools.count():
        sent = time.monotonic_ns()
        _move(comm, rank, tag, sent, False)
        theirs = _move(comm, rank, tag, 0, True)
        came = time.monotonic_ns()
        offset = Offset((sent + came) // 2, theirs - (sent + came) // 2, (came - sent) // 2)
        best = min(best, offset, key=lambda each: each.error)
        if time.monotonic() > until or (number >= _ROUNDS and best.error < _ENOUGH_NS):
            break
    _move(comm, rank, tag, _END, False)
    return best


def _answer(comm: Any, tag: int) -> None:
    while _move(comm, 0, tag, 0, True) != _END:
        _move(comm, 0, tag, time.monotonic_ns(), False)


def _move(comm: Any, rank: int, tag: int, number: int, receives: bool) -> int:
    """Send a number, or receive one.

    Raises:
        TimeoutError: the other rank is not there any more.
    """
    until, buffer = time.monotonic() + _LOST_SECONDS, array("q", [number])

    def check() -> None:
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank} does not answer")

    with runtime.exclusive():
        request = (comm.Irecv if receives else comm.Isend)([buffer, runtime.mpi().INT64_T], rank, tag)
    nonblocking.wait(request, (buffer,), check, 0)
    return buffer[0]
