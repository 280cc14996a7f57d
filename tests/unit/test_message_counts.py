"""What the engine sends between nodes, against the formulas of docs/scaling.md; what `info` tells of its memory."""

import importlib
from pathlib import Path

import numpy as np
import psutil
import pytest
from plain_python import module_of
from ranks_in_one_process import Ranks

from torchmpi_plugin.communicator import shared_memory
from torchmpi_plugin.node import node

formulas = module_of(Path(__file__).resolve().parents[1] / "tools" / "message_counts.py")

#: By nodes and ranks: the nodes' numbers, of each rank in turn.
SHAPES = {
    "2x2": [0, 0, 1, 1],
    "4x1": [0, 1, 2, 3],
    "4x2": [0, 0, 1, 1, 2, 2, 3, 3],
    "3 uneven": [0, 0, 0, 1, 2, 2],
    "3 uneven, in turn": [0, 1, 2, 0, 1, 0],
    "5x3": [node for node in range(5) for _ in range(3)],
    "7x1": list(range(7)),
    "16x4": [node for node in range(16) for _ in range(4)],
    "1x32": [0] * 32,
}
TYPES = {"F32": (4, 1), "BF16": (2, 2)}  # bytes of an element, and how many times as long a sum is
SHORT, CHUNKS = 48, 3
EIGHTHS = 8  # chunks where each node has one rank: one has an eighth of the tensor or less
HALVED = 40 << 10  # of a tensor: piggybacked, but not whole
CUT = ("all_reduce", "reduce", "broadcast")  # into pieces, one for each leader and node


def slot_of(shape):
    """That of groups in life, or a small one where that would take minutes."""
    return 64 << 10 if len(shape) <= 8 else 4 << 10


def call(ranks, operation, nbytes, dtype, root):
    """One operation on all ranks, on zeros."""
    size = ranks.size
    how, count = ranks.reduction(dtype), nbytes // TYPES[dtype][0]
    buffers = [np.zeros((2 * size * nbytes) or 1, np.uint8) for _ in range(size)]
    ins = [buffer.ctypes.data for buffer in buffers]
    outs = [address + size * nbytes for address in ins]

    def exchange(rank, group):
        to = {"all_to_all": range(size), "gather": [root], "scatter": range(size) if rank == root else []}[operation]
        of = {"all_to_all": range(size), "scatter": [root], "gather": range(size) if rank == root else []}[operation]
        lists = {"inputs": ins[rank], "outputs": outs[rank]}
        lists = {name: [begin + other * nbytes for other in range(size)] for name, begin in lists.items()}
        sizes = {name: [nbytes * (other in those) for other in range(size)]
                 for name, those in (("input_sizes", to), ("output_sizes", of))}  # fmt: skip
        return ranks.begin("exchange", group, **lists, **sizes)

    def reduced(rank, _):
        mine = buffers[rank][: size * nbytes]
        return ranks.reduce(operation, rank, mine, buffers[rank][size * nbytes :], how, [count] * size, root)

    ranks.of_all({
        "barrier": lambda rank, group: ranks.begin("barrier", group),
        "broadcast": lambda rank, _: ranks.broadcast(rank, ins[rank], nbytes, root),
        "all_gather": lambda rank, _: ranks.gather(rank, ins[rank], outs[rank], nbytes),
        **dict.fromkeys(("all_reduce", "reduce", "reduce_scatter"), reduced),
    }.get(operation, exchange))  # fmt: skip


def sent_by(ranks, nodes):
    """By rank, as the formulas have it."""
    found = [formulas.Sent() for _ in nodes]
    for source, to, _, length in ranks.messages():
        far = nodes[source] != nodes[to]
        found[source] += formulas.Sent(1, length) if far else formulas.Sent(local=1)
    return found


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_messages_and_bytes(shim_of_all_ranks, shape, dtype, reproducible):
    group = formulas.Group(tuple(shape), slot_of(shape), reproducible)
    several, wide = group.nodes > 1, TYPES[dtype][1]
    chunks = EIGHTHS if group.nodes == len(shape) else CHUNKS
    ranks = Ranks(shim_of_all_ranks, len(shape), formulas.RING, group.slot, shape if several else None, reproducible)
    ranks.messages()
    wrong = []
    for operation in formulas.OPERATIONS:
        sizes = [SHORT, chunks * formulas.chunk_bytes(group, operation, wide=wide)] if operation != "barrier" else [0]
        if operation in formulas.EXCHANGES:  # a message, of any length
            sizes[1] = group.slot + SHORT
        for nbytes in [*sizes, HALVED] if operation in CUT and group.slot >= HALVED else sizes:
            chunk = min(nbytes, formulas.chunk_bytes(group, operation, nbytes, wide))
            for root in (0, len(shape) - 1):
                call(ranks, operation, nbytes, dtype, root)
                wanted = formulas.counts(group, operation, nbytes, wide, root)
                # in whole cache lines each
                pieces = group.leaders_per_node * max(1, group.nodes - (operation == "broadcast"))
                for rank, (sent, formula) in enumerate(zip(sent_by(ranks, shape), wanted, strict=True)):
                    uneven = nbytes > SHORT and operation in CUT and chunk // 64 % pieces
                    rounding = 64 * wide * max(group.parts) * formula.messages if uneven else 0
                    same = (sent.messages, sent.local) == (formula.messages, formula.local)
                    if not same or abs(sent.bytes - formula.bytes) > rounding:
                        wrong.append((operation, nbytes, root, rank, sent, formula))
    ranks.close()
    assert not wrong


KIB, MIB = 1 << 10, 1 << 20
#: malloc gives a few bytes more here than there.
OF_MALLOC = 512


@pytest.fixture(params=["_shim_int", "_shim_ptr"])
def shim(request):
    return importlib.import_module(f"torchmpi_plugin.{request.param}")


def cost(shim, *hosts: str) -> list[shared_memory.Footprint]:
    return shared_memory.of_layout(shim.lib, shim.ffi, node.places(hosts))


def test_on_one_host(shim) -> None:
    """As the documentation says."""
    for ranks, each in ((1, 1024), (4, 1024), (5, 512), (8, 512), (9, 256), (255, 256)):
        (found,) = cost(shim, *["a"] * ranks)
        assert each * KIB < found.segment / ranks < (each + 1) * KIB
    (found,) = cost(shim, "a", "a", "a")
    assert 0 < found.own < 4 * KIB
    assert found.later == 0


def test_between_hosts_each_has_its_own(shim) -> None:
    one, other = cost(shim, "a", "b", "a")
    from_elsewhere = shared_memory.SLOTS * 60 * KIB  # MPP_EAGER of message/message.h
    of_one_rank = other.segment - 2 * from_elsewhere
    assert 256 * KIB < of_one_rank < 257 * KIB
    assert one.segment == 2 * of_one_rank + 1 * from_elsewhere
    assert one.own == pytest.approx(other.own, abs=OF_MALLOC)
    assert one.own > 32 * KIB
    assert one.later == pytest.approx(other.later, rel=0.01)
    assert one.later > 3 * MIB


def data_bytes() -> int:
    """This process's memory, whether it has been touched or not."""
    return psutil.Process().memory_info().data


def test_what_is_thought_of_is_given_back(shim) -> None:
    hosts = [f"node {rank % 5}" for rank in range(8)]
    (first, *_) = cost(shim, *hosts)
    before = data_bytes()
    for _ in range(200):
        cost(shim, *hosts)
    assert data_bytes() - before < 50 * first.own
