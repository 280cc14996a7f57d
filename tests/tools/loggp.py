"""Times of the collectives between nodes by the LogGP model, written into docs/scaling.md.

    python tests/tools/loggp.py                                             # the tables
    mpirun -n 2 --host node1,node2 python tests/tools/loggp.py measure      # a network's parameters
    mpirun -n 2 --host node1,node2 python tests/tools/loggp.py compare      # the same, and the model beside mpiplus

LogGP: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: Incorporating Long Messages into the LogP Model", 1995. How
many messages and bytes there are is in message_counts.py, what MPI's algorithms take in mpi_algorithms.py.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import message_counts
import mpi_algorithms
from message_counts import RING, Group

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
MARKED = re.compile(r"(?<=<!-- loggp -->\n).*?(?=<!-- /loggp -->)", re.S)


class Network(NamedTuple):
    """What LogGP knows of a network; in microseconds, and microseconds per byte.

    Attributes:
        latency: L, from one node to the other.
        overhead: o, of a processor for each message that it sends or receives.
        gap: g, between two messages of one rank.
        per_byte: G, of all that a node sends.
    """

    latency: float
    overhead: float
    gap: float
    per_byte: float

    @property
    def message(self) -> float:
        """From the call that sends a short message to the end of the one that receives it."""
        return self.latency + 2 * self.overhead

    @property
    def between(self) -> float:
        """From one message of a rank to its next one."""
        return max(self.gap, 2 * self.overhead)


#: What `measure` said of two nodes of tests/network.py, under Open MPI 5.0.11; and a guess.
NETWORKS = {
    "TCP between two network namespaces of one machine, measured": Network(2.6, 3.7, 3.7, 0.00136),
    "a fabric of 100 Gb/s, assumed": Network(1.5, 0.5, 0.5, 1 / 12_000),
}
RANKS_PER_HOST = 8
HOSTS = (2, 16, 128, 1250)
ROWS = (
    *(("barrier", 0), ("all_reduce", 8), ("all_reduce", 64 << 10), ("all_reduce", 64 << 20), ("reduce", 64 << 20)),
    *(("broadcast", 64 << 20), ("all_gather", 8), ("all_gather", 64 << 10), ("reduce_scatter", 64 << 10)),
    *(("all_to_all", 4 << 10), ("gather", 4 << 10)),
)


# ---- the model ----


class Estimate(NamedTuple):
    """A time in microseconds, and what most of it is: latency, messages, bytes, or the ring."""

    time: float
    because: str


def estimate(network: Network, group: Group, operation: str, nbytes: int, wide: int = 1) -> Estimate:
    """How long one operation takes.

    A short one is as many messages one after the other as there are levels of nodes, and one more where shares are
    sent in the end. A long one is the agreement, without data, then its phases, and then the longest of: a rank's
    messages, a node's bytes, and the ring, which lets no more than so many chunks be under way. What the ranks of one
    node do among themselves is not counted.
    """
    message, each = network.message, network.between
    levels = message_counts.levels(group.nodes)
    if operation == "gather":  # root receives what it would send in a scatter
        operation = "scatter"
    those = group.on_node[0] + group.on_node[-1]
    sent = dict(zip(those, message_counts.counts(group, operation, nbytes, wide, of=those), strict=True))
    if operation not in message_counts.EXCHANGES and message_counts.is_short(group, operation, nbytes, wide):
        first = max((sent[ranks[0]] for ranks in (group.on_node[0], group.on_node[-1])), key=lambda it: it.bytes)
        steps = message_counts.steps(group, operation, nbytes, wide)
        parts = {
            "latency": steps * message,
            "messages": max(0, first.messages - steps) * each,
            "bytes": first.bytes * network.per_byte,
        }
        return Estimate(sum(parts.values()), max(parts, key=lambda name: parts[name]))
    phases = {"all_reduce": 2, "reduce": 2, "broadcast": 2}.get(operation, 1)
    chunks = -(-nbytes // message_counts.chunk_bytes(group, operation, nbytes, wide))
    if operation == "reduce_scatter":
        chunks *= -(-group.ranks // group.ranks_per_slot)
    parts = {
        "messages": max(of_rank.messages for of_rank in sent.values()) * each,
        "bytes": max(sum(sent[rank].bytes for rank in ranks) for ranks in (group.on_node[0], group.on_node[-1]))
        * network.per_byte,
        "ring": 0 if operation in message_counts.EXCHANGES else chunks / RING * phases * message,
    }
    most = max(parts, key=lambda name: parts[name])
    start = (levels + phases) * message
    return Estimate(start + parts[most], most if parts[most] > start else "latency")


# ---- the page ----


def _words(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def _bytes(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def _cell(network: Network, group: Group, operation: str, nbytes: int) -> str:
    ours = estimate(network, group, operation, nbytes)
    nodes = mpi_algorithms.Nodes(group.nodes, RANKS_PER_HOST)
    time, algorithm = mpi_algorithms.fastest(network, nodes, operation, nbytes)
    return f"{_words(ours.time)}, {ours.because}; MPI {_words(time)}, {algorithm}"


def _table(network: Network) -> str:
    groups = [Group(tuple(node for node in range(nodes) for _ in range(RANKS_PER_HOST))) for nodes in HOSTS]
    titles = " | ".join(f"{group.ranks:,} ranks on {group.nodes:,} nodes" for group in groups)
    lines = [f"| | {titles} |", "|---|" + "---|" * len(groups)]
    for operation, nbytes in ROWS:
        cells = " | ".join(_cell(network, group, operation, nbytes) for group in groups)
        lines.append(f"| {operation}{f' {_bytes(nbytes)}' if nbytes else ''} | {cells} |")
    return "\n".join(lines)


def tables() -> str:
    """What stands between the marks of the page."""
    found = []
    for name, network in NETWORKS.items():
        words = (
            f"L {network.latency:.3g} µs, o {network.overhead:.3g} µs, g {network.gap:.3g} µs, "
            f"{1 / network.per_byte / 1000:.3g} GB/s"
        )
        found.append(f"{name[0].upper()}{name[1:]} ({words}):\n\n{_table(network)}\n")
    return "\n".join(found)


def page() -> str:
    """The page with the tables made anew."""
    return MARKED.sub(lambda _: tables(), PAGE.read_text())


# ---- on two ranks ----


def _ping_pong(comm: Any, nbytes: int, rounds: int) -> float:
    """Half a round trip, in microseconds."""
    buffer, peer = bytearray(nbytes), 1 - comm.Get_rank()
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(rounds):
        if peer:
            comm.Send(buffer, peer)
            comm.Recv(buffer, peer)
        else:
            comm.Recv(buffer, peer)
            comm.Send(buffer, peer)
    return (time.perf_counter() - begin) / rounds / 2 * 1e6


def _stream(comm: Any, nbytes: int, messages: int) -> float:
    """From the first of many messages to the word that the last one has come, in microseconds."""
    comm.Barrier()
    begin = time.perf_counter()
    if comm.Get_rank() == 0:
        buffer = bytes(nbytes)
        for request in [comm.Isend(buffer, 1) for _ in range(messages)]:
            request.Wait()
        comm.Recv(bytearray(1), 1)
    else:
        buffers = [bytearray(nbytes) for _ in range(messages)]
        for request in [comm.Irecv(buffer, 0) for buffer in buffers]:
            request.Wait()
        comm.Send(b"1", 0)
    return (time.perf_counter() - begin) * 1e6


def _overhead(comm: Any, rounds: int = 50) -> float:
    """Of sending a byte, and of receiving one that has been there for long: their mean, in microseconds."""
    took = []
    for _ in range(rounds):
        comm.Barrier()
        if comm.Get_rank():
            time.sleep(0.003)
        begin = time.perf_counter()
        if comm.Get_rank():
            comm.Recv(bytearray(1), 0)
            took.append(time.perf_counter() - begin)
        else:
            request = comm.Isend(b"1", 1)
            took.append(time.perf_counter() - begin)
            request.Wait()
    both = comm.allgather(min(took))
    return float(sum(both) / 2 * 1e6)


def measure(comm: Any) -> Network:
    """A network's parameters, from messages between two ranks: the best of 15 tries each, as others only add."""

    def best(function: Callable[[], float]) -> float:
        return float(comm.bcast(min(function() for _ in range(15))))

    gap = best(lambda: _stream(comm, 1, 500)) / 500
    overhead = min(_overhead(comm), gap)  # a processor that is slower alone than in a row had been asleep
    latency = max(0.0, best(lambda: _ping_pong(comm, 1, 300)) - 2 * overhead)
    small, large, messages = 64 << 10, 1 << 20, 32
    longer = best(lambda: _stream(comm, large, messages)) - best(lambda: _stream(comm, small, messages))
    return Network(latency, overhead, gap, longer / messages / (large - small))


def compare(network: Network) -> None:
    """Print how long mpiplus takes between the two ranks, and what the model says."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpiplus")
    group = Group((0, 1))
    for nbytes in (8, 64 << 10, 1 << 20, 16 << 20):
        tensor, took = torch.zeros(nbytes // 4), []
        for _ in range(9):
            rounds = 200 if nbytes < 1 << 16 else 3
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(rounds):
                dist.all_reduce(tensor)
            took.append((time.perf_counter() - begin) / rounds * 1e6)
        if dist.get_rank() == 0:
            said = estimate(network, group, "all_reduce", nbytes)
            print(f"all_reduce {_bytes(nbytes)}: {_words(min(took))}, the model: {_words(said.time)}")
    dist.destroy_process_group()


def main() -> None:
    """See the top."""
    if len(sys.argv) == 1:
        PAGE.write_text(page())
        print(f"wrote {PAGE.name}")
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if comm.Get_size() != 2:
        sys.exit("between two ranks, on two nodes")
    network = measure(comm)
    if comm.Get_rank() == 0:
        print(network)
    if "compare" in sys.argv:
        compare(network)


if __name__ == "__main__":
    main()
