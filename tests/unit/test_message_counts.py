"""What the engine sends between nodes, and the memory that it takes, against the formulas of docs/scaling.md."""

from pathlib import Path

import numpy as np
import pytest
from plain_python import module_of
from ranks_in_one_process import Ranks

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


@pytest.mark.parametrize("reproducible", [False, True])
def test_memory(shim_of_all_ranks, shape, reproducible):
    """Of a segment, and of a rank: from the beginning, and from its first long operation on."""
    group, lib = formulas.Group(tuple(shape), slot_of(shape), reproducible), shim_of_all_ranks.lib
    several, size = group.nodes > 1, len(shape)
    for node, there in enumerate(group.on_node):
        length = lib.mpp_segment_size(size, len(there), formulas.RING, group.slot)
        assert 0 < length - formulas.segment_bytes(group, node) <= 1024 * len(there)
    before = lib.allocated_bytes()
    ranks = Ranks(shim_of_all_ranks, size, formulas.RING, group.slot, shape if several else None, reproducible)
    new_group = 2048  # the group itself, and its channel; messages to come
    taken = (lib.allocated_bytes() - before) / size
    assert 0 <= taken - formulas.agreement_bytes(group) <= new_group + 64 * size + 1024 * formulas.levels(group.nodes)
    before = lib.allocated_bytes()
    call(ranks, "all_reduce", CHUNKS * group.slot, "F32", 0)
    taken = lib.allocated_bytes() - before
    pipeline = sum(formulas.pipeline_bytes(group, rank) for rank in range(size)) if several else 0
    assert 0 <= taken - pipeline <= size * (new_group + 4096 * (group.nodes + size))
    ranks.close()
