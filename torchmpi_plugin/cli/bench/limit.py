"""Latency and bandwidth of plain messages between two nodes, beside which the operations are to be seen."""

from __future__ import annotations

from mpi4py import MPI

from .measure import Call
from .results import Link
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
    timings = session.measure(calls, repeats, block_seconds)
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
