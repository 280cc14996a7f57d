"""What the program has under way in MPI itself moves while its rank waits in a call of ours."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from steps import ME, SIZE, run, say

import torchmpi_plugin

COMM = MPI.COMM_WORLD
LONG = 1 << 20


def get_from_rank_0() -> Iterator[None]:
    """Rank 1 reads rank 0's part of a window, many times."""
    window = MPI.Win.Allocate(8 * LONG, 8, comm=COMM)
    np.frombuffer(memoryview(window.tomemory()), dtype="d")[:] = ME + 7
    COMM.Barrier()
    yield
    got = np.zeros(LONG)
    for _ in range(20 if ME == 1 else 0):
        window.Lock(0, MPI.LOCK_SHARED)
        window.Get(got, 0)
        window.Unlock(0)
    assert ME != 1 or (got == 7).all()
    yield
    window.Free()


def end_of_a_reduction() -> Iterator[None]:
    """All have begun one; rank 1 waits for its part before it comes to ours."""
    mine, total = np.full(LONG, 1.0), np.zeros(LONG)
    request = COMM.Iallreduce(mine, total)
    yield
    if ME == 1:
        request.Wait()
    yield
    request.Wait()
    assert (total == SIZE).all()


def long_message_from_rank_0() -> Iterator[None]:
    """Rank 0 has begun to send it."""
    data = np.full(LONG, 7.0 + ME)
    request = COMM.Isend(data, 1) if ME == 0 else MPI.REQUEST_NULL
    yield
    if ME == 1:
        COMM.Recv(data, 0)
        assert (data == 7).all()
    yield
    request.Wait()


def in_a_future(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True).get_future().wait()


def waits() -> dict[str, Callable[[], object]]:
    """Calls of ours that rank 0 waits in until rank 1 comes."""
    tensor = torch.ones(3)
    return {
        "barrier": dist.barrier,
        "wait": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "future": lambda: in_a_future(tensor),
        "new_group": lambda: dist.new_group(list(range(SIZE))),
        "recv": lambda: dist.recv(tensor, 1) if ME == 0 else dist.send(tensor, 0) if ME == 1 else None,
        "monitored_barrier": torchmpi_plugin.monitored_barrier,
        "destroy": lambda: dist.destroy_process_group(dist.new_group(list(range(SIZE)))),
    }


def each() -> None:
    """Each use of MPI in each of our waits: the last line says what hangs."""
    dist.init_process_group("mpiplus", timeout=datetime.timedelta(seconds=100))
    for name in waits():
        for begin in (get_from_rank_0, end_of_a_reduction, long_message_from_rank_0):
            use = begin()
            next(use)
            if ME == 1:
                time.sleep(0.02)
            say(f"{name} {begin.__name__}")
            next(use)
            waits()[name]()
            next(use, None)
            COMM.Barrier()
    dist.destroy_process_group()


run(globals())
