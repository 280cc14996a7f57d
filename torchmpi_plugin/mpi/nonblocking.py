"""Collectives of a few bytes while a group is made: MPI's nonblocking ones, so that who waits can give up."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from typing import Any

from . import runtime

_POLL_SECONDS = 0.0002
#: Before the first pause: the shortest is of 50 us and more, as long as a message of TCP takes, and a step of a group
#: that is made takes several messages.
_AWAKE_SECONDS = 0.001
_FAREWELL_TAG = 0
#: Requests that were given up, with the buffers that MPI may still use.
_kept: list[Any] = []

#: Asked while something is awaited: raises what it is to be given up for.
Check = Callable[[], None]


def wait(request: Any, buffers: tuple[Any, ...], check: Check) -> None:
    """Until ``request`` is complete, or ``check`` raises; MPI keeps the buffers then."""
    pause_at = time.monotonic() + _AWAKE_SECONDS
    try:
        while True:
            with runtime.exclusive():
                if request.Test():
                    return
            check()
            if time.monotonic() > pause_at:
                time.sleep(_POLL_SECONDS)
            else:
                os.sched_yield()
    except BaseException:
        _kept.append((request, buffers))
        raise


def all_gather(comm: Any, mine: bytes, check: Check) -> list[bytes]:
    """Every rank's bytes, on every rank; as many as each of them likes."""
    mpi = runtime.mpi()
    length, lengths = array("i", [len(mine)]), array("i", [0] * comm.Get_size())
    with runtime.exclusive():
        request = comm.Iallgather([length, mpi.INT], [lengths, mpi.INT])
    wait(request, (length, lengths), check)
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    everything = bytearray(sum(lengths))
    with runtime.exclusive():
        request = comm.Iallgatherv([mine, mpi.BYTE], [everything, (list(lengths), starts), mpi.BYTE])
    wait(request, (mine, everything), check)
    return [bytes(everything[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def barrier(comm: Any, check: Check) -> None:
    """Until all ranks have come."""
    with runtime.exclusive():
        request = comm.Ibarrier()
    wait(request, (), check)


def silent_ranks(comm: Any, seconds: float) -> list[int]:
    """Of ranks that give up at about the same time, those that do not: whom the others have waited for.

    Each says so to each, on a communicator that is of no use any more.
    """
    mpi, size, me = runtime.mpi(), comm.Get_size(), comm.Get_rank()
    nothing, heard, status = bytearray(1), {me}, mpi.Status()
    until = time.monotonic() + seconds
    for rank in range(size):
        if rank != me:
            with runtime.exclusive():
                _kept.append((comm.Isend([nothing, mpi.BYTE], rank, _FAREWELL_TAG), nothing))
    while len(heard) < size and time.monotonic() < until:
        with runtime.exclusive():
            if comm.Iprobe(mpi.ANY_SOURCE, _FAREWELL_TAG, status):
                comm.Recv([bytearray(1), mpi.BYTE], status.Get_source(), _FAREWELL_TAG)
                heard.add(status.Get_source())
                continue
        time.sleep(_POLL_SECONDS)
    return [rank for rank in range(size) if rank not in heard]
