"""Measurements beside the operations: what messages and copies to a device reach, and an all_reduce behind a sleep."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from .device import Device
from .measure import Call, take_turns
from .operations import OPERATIONS, Case, raw_message
from .results import FRONT_END, NONBLOCKING, OVERLAP_SIZE, OVERLAP_SLEEP, RAW, Bus, Link, Overlap
from .session import Session

_SMALL, _LARGE = 8, 16 * 1024**2


def measure_link(session: Session, repeats: int, block_seconds: float) -> Link | None:
    """Measure messages of rank 0 and the first rank of another node, or rank 1 where all are on one.

    Returns:
        The same on every rank; None for one rank.
    """
    if session.size == 1:
        return None
    nodes = session.nodes
    peer = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), 1)
    nothing: dict[str, Call] = {"ping_pong": lambda: None, "exchange": lambda: None}
    calls = _calls(session.comm, peer) if session.rank in (0, peer) else nothing
    timings = take_turns(calls, repeats, block_seconds, session)
    names = session.comm.allgather(MPI.Get_processor_name())
    return Link(
        ranks=(0, peer),
        hosts=(names[0], names[peer]),
        latency_us=1e6 * timings["ping_pong"].median / 2,
        size=_LARGE,
        exchange_us=1e6 * timings["exchange"].median,
    )


def _calls(comm: MPI.Intracomm, peer: int) -> dict[str, Call]:
    """Return the calls that rank 0 makes, or the other one, by name."""
    other = peer if comm.rank == 0 else 0
    ball = [bytearray(_SMALL), MPI.BYTE]
    # Written to: untouched zeros are one page of the kernel's, always in the cache.
    out, into = ([bytearray(b"\1" * _LARGE), MPI.BYTE] for _ in range(2))

    def ping_pong() -> None:
        if comm.rank == 0:
            comm.Send(ball, other)
            comm.Recv(ball, other)
        else:
            comm.Recv(ball, other)
            comm.Send(ball, other)

    def exchange() -> None:
        MPI.Request.Waitall([comm.Irecv(into, other), comm.Isend(out, other)])

    return {"ping_pong": ping_pong, "exchange": exchange}


def measure_bus(session: Session, repeats: int, block_seconds: float) -> Bus | None:
    """Measure copies between pinned memory and the device, which all ranks make at once.

    Returns:
        The same on every rank; None where tensors are in host memory.
    """
    if session.device.is_cpu:
        return None
    timings = take_turns(_copies(session.device), repeats, block_seconds, session)
    return Bus(size=_LARGE, **{f"{name}_us": 1e6 * turns.median for name, turns in timings.items()})


def _copies(device: Device) -> dict[str, Call]:
    """Return the calls by name; but for the first, the timer waits for them."""
    out, into = (device.tensor(_LARGE, torch.uint8) for _ in range(2))
    pinned_into, pinned_out = (device.pinned(_LARGE) for _ in range(2))
    streams = device.new_stream(), device.new_stream()

    def short() -> None:
        into[:_SMALL].copy_(pinned_out[:_SMALL], non_blocking=True)
        device.settle()

    def to_device() -> None:
        into.copy_(pinned_out, non_blocking=True)

    def from_device() -> None:
        pinned_into.copy_(out, non_blocking=True)

    def exchange() -> None:
        for stream, copy in zip(streams, (to_device, from_device), strict=True):
            with stream:
                copy()

    return {"latency": short, "to_device": to_device, "from_device": from_device, "exchange": exchange}


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
