"""Measurements beside the operations: what messages and copies to a device reach, and an all_reduce behind a sleep."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from .device import CPU, Device
from .measure import Call, take_turns
from .operations import OPERATIONS, Case, Raw, raw_message
from .results import FRONT_END, NONBLOCKING, OVERLAP_SIZE, OVERLAP_SLEEP, RAW, Bus, Link, Overlap
from .session import Session

_SMALL, _LARGE = 8, 16 * 1024**2


def measure_link(session: Session, repeats: int, block_seconds: float) -> Link | None:
    """Measure messages of rank 0 and the first rank of another node, else rank 1; None, on all ranks, for one rank."""
    if session.size == 1:
        return None
    nodes = session.nodes
    peer = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), 1)
    pair = session.comm.Split(0 if session.rank in (0, peer) else MPI.UNDEFINED)
    calls: dict[str, Call] = {"ping_pong": lambda: None, "exchange": lambda: None}
    if pair != MPI.COMM_NULL:
        ball, out, into = (CPU.tensor(size, torch.float32) for size in (_SMALL // 4, _LARGE // 4, _LARGE // 4))
        calls["ping_pong"] = OPERATIONS["ping_pong"].raw(Raw(pair, blocking=True), ball, ball)
        received, sent, other = raw_message(into), raw_message(out), 1 - pair.rank
        calls["exchange"] = lambda: MPI.Request.Waitall([pair.Irecv(received, other), pair.Isend(sent, other)])
    timings = take_turns(calls, repeats, block_seconds, session)
    if pair != MPI.COMM_NULL:
        pair.Free()
    names = session.comm.allgather(MPI.Get_processor_name())
    return Link(
        ranks=(0, peer),
        hosts=(names[0], names[peer]),
        latency_us=1e6 * timings["ping_pong"].median / 2,
        size=_LARGE,
        exchange_us=1e6 * timings["exchange"].median,
    )


def measure_bus(session: Session, repeats: int, block_seconds: float) -> Bus | None:
    """Measure copies to the device and back, of all ranks at once; None where tensors are in host memory."""
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
            session.synchronise()
            wait = _start(session, name, tensors[name][0])
            time.sleep(OVERLAP_SLEEP)
            start = time.perf_counter()
            wait()
            session.settle()
            seconds.append(session.slowest(time.perf_counter() - start))
    return [Overlap(name, 1e6 * sync[name].median, 1e6 * statistics.median(waits[name])) for name in calls]


def _start(session: Session, name: str, data: Tensor) -> Call:
    if name in (RAW, NONBLOCKING):
        wait: Call = session.comm.Iallreduce(MPI.IN_PLACE, raw_message(data)).Wait
        return wait
    work = dist.all_reduce(data, group=session.groups[name], async_op=True)
    assert work is not None
    return work.wait
