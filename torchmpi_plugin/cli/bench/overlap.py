"""Progress of an asynchronous all_reduce while the caller does something else."""

from __future__ import annotations

import statistics
import time

import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from .measure import Call, take_turns
from .operations import OPERATIONS, Case, raw_message
from .results import FRONT_END, NONBLOCKING, OVERLAP_SIZE, OVERLAP_SLEEP, RAW, Overlap
from .session import Session


def measure_overlap(session: Session, repeats: int, block_seconds: float) -> list[Overlap]:
    """Measure every contestant in turns; the times are medians of the slowest rank's."""
    case = Case(OPERATIONS["all_reduce"], "float32", OVERLAP_SIZE)
    calls, _ = session.calls(case)
    calls.pop(FRONT_END, None)
    if NONBLOCKING in calls:
        calls.pop(RAW, None)  # its asynchronous form is the other
    sync = take_turns(calls, repeats, block_seconds, session)
    tensors = session.tensors(case)
    waits: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, seconds in waits.items():
            seconds.append(_wait_seconds(session, name, tensors[name][0]))
    return [Overlap(name, 1e6 * sync[name].median, 1e6 * statistics.median(waits[name])) for name in calls]


def _wait_seconds(session: Session, name: str, data: Tensor) -> float:
    session.synchronise()
    wait = _start(session, name, data)
    time.sleep(OVERLAP_SLEEP)
    start = time.perf_counter()
    wait()
    session.settle()
    return session.slowest(time.perf_counter() - start)


def _start(session: Session, name: str, data: Tensor) -> Call:
    if name in (RAW, NONBLOCKING):
        wait: Call = session.comm.Iallreduce(MPI.IN_PLACE, raw_message(data)).Wait
        return wait
    work = dist.all_reduce(data, group=session.groups[name], async_op=True)
    assert work is not None
    return work.wait
