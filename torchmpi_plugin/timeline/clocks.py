"""Offsets of other nodes' clocks from rank 0's: messages there and back, of which the fastest tell most.

And what plain messages reach, beside which the page shows operations.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from ..mpi import nonblocking, runtime

#: Per node: so many messages there and back, again until the error is small enough, ns: on idle cores, and after so
#: long on busy ones; for so long at the most.
_ROUNDS, _ENOUGH_NS, _SECONDS, _MOST_SECONDS = 100, (20_000, 50_000), 0.5, 2.0
#: Two clocks gain less than a part of so many on each other, which counts little in so many ns.
_DRIFT, _AT_ONCE_NS = 10_000, 50_000_000
#: For so long a message is awaited.
_LOST_SECONDS = 3.0
_POLL_SECONDS = 0.005
_END = 0
#: Of plain messages: bytes, of each size so many there and back; no further size after so long.
_SIZES, _REACH_ROUNDS, _REACH_SECONDS = [1 << power for power in range(4, 25, 4)], 5, 0.1


class Offset(NamedTuple):
    """A node's clock less rank 0's, when that said ``at``; in ns. It is wrong by ``error`` at most."""

    at: int
    offset: int
    error: int


def measure(store: Any, communicator: Any, when: str, seconds: float, say: Callable[[dict[str, Any]], None]) -> None:
    """Called by all ranks that record: the first one of each other node and rank 0 exchange messages.

    At the end rank 0 and one of them, or rank 1 where there is one node, find out what plain messages reach, too.

    Args:
        store, communicator: the world's; by the store they find each other.
        when: "begin" or "end", which makes the names of this measurement's keys.
        seconds: for so long they wait for each other.
        say: what rank 0 tells of what was found; nothing of a node whose rank has not come.
    """
    comm, me, tag = communicator.comm, communicator.comm.Get_rank(), communicator.clock_tag
    firsts = {communicator.node_of(rank): rank for rank in reversed(range(comm.Get_size()))}
    own = communicator.node_of(0)
    del firsts[own]
    if not firsts and when == "end" and comm.Get_size() > 1:
        firsts = {own: 1}
    until, count = time.monotonic() + seconds, len(firsts)
    if me in firsts.values():
        store.set(key(when, "here", me), "")
        if appears(store, key(when, "go", me), until):
            _answer(comm, tag)
    while me == 0 and firsts and time.monotonic() < until:
        for node, rank in [each for each in firsts.items() if store.check([key(when, "here", each[1])])]:
            store.set(key(when, "go", rank), "")
            del firsts[node]
            if node != own:
                say({"clock": node, **_ask(comm, rank, tag)._asdict()})
            if when == "end" and len(firsts) == count - 1:
                say({"messages": _reach(comm, rank, tag), "with": rank})
            _move(comm, rank, tag, _END, False)
        time.sleep(_POLL_SECONDS)


def key(*parts: object) -> str:
    """Of the store."""
    return "/".join(["mpiplus/timeline", *map(str, parts)])


def appears(store: Any, key: str, until: float) -> bool:
    """Wait for a key of the store."""
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _ask(comm: Any, rank: int, tag: int) -> Offset:
    begun, best = time.monotonic(), _bounds(comm, rank, tag)
    while (taken := time.monotonic() - begun) < _MOST_SECONDS and best.error > _ENOUGH_NS[taken > _SECONDS]:
        best = min(best, _bounds(comm, rank, tag), key=lambda each: each.error)
    return best


def _bounds(comm: Any, rank: int, tag: int) -> Offset:
    """The fastest message there says how far ahead their clock is at most, the fastest back how far at least."""
    begun, least, most = time.monotonic_ns(), -1 << 62, 1 << 62
    for _ in range(_ROUNDS):
        sent = time.monotonic_ns()
        _move(comm, rank, tag, sent, False)
        theirs = _move(comm, rank, tag, 0, True)
        came = time.monotonic_ns()
        least, most = max(least, theirs - came), min(most, theirs - sent)
        if came - begun > _AT_ONCE_NS:
            break
    return Offset((begun + came) // 2, (least + most) // 2, (most - least) // 2 + (came - begun) // _DRIFT)


def _reach(comm: Any, rank: int, tag: int) -> dict[int, int]:
    """By size in bytes the ns that a message takes one way: of some the fastest."""
    reached: dict[int, int] = {}
    until = time.monotonic() + _REACH_SECONDS
    for size in _SIZES:
        buffer = bytearray(size)
        for _ in range(_REACH_ROUNDS if time.monotonic() < until else 0):
            _move(comm, rank, tag, -size, False)
            begun = time.monotonic_ns()
            _transfer(comm, rank, tag, buffer, False)
            _transfer(comm, rank, tag, buffer, True)
            taken = (time.monotonic_ns() - begun) // 2
            reached[size] = min(taken, reached.get(size, taken))
    return reached


def _answer(comm: Any, tag: int) -> None:
    """Rank 0's times with the time, and as many bytes as it asks for with the same."""
    while (asked := _move(comm, 0, tag, 0, True)) != _END:
        if asked > 0:
            _move(comm, 0, tag, time.monotonic_ns(), False)
            continue
        buffer = bytearray(-asked)
        _transfer(comm, 0, tag, buffer, True)
        _transfer(comm, 0, tag, buffer, False)


def _move(comm: Any, rank: int, tag: int, number: int, receives: bool) -> int:
    buffer = array("q", [number])
    _transfer(comm, rank, tag, buffer, receives)
    return buffer[0]


def _transfer(comm: Any, rank: int, tag: int, buffer: Any, receives: bool) -> None:
    """Send what is in the buffer, or receive into it; a TimeoutError: the other rank is not there any more."""
    until = time.monotonic() + _LOST_SECONDS

    def check() -> None:
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank} does not answer")

    with runtime.exclusive():
        request = (comm.Irecv if receives else comm.Isend)([buffer, runtime.mpi().BYTE], rank, tag)
    nonblocking.wait(request, (buffer,), check)
