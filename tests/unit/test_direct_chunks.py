"""Among nodes with one rank each chunks may be longer than slots: at the borders of their lengths."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from ranks_in_one_process import Ranks

SLOTS, SLOT = 4, 1024
LINE = 64
#: The bits of 0, 1, 2, ... by type.
COUNTS: dict[str, npt.NDArray] = {
    "I8": np.arange(9, dtype=np.int8),
    "F32": np.arange(9, dtype=np.float32),
    "F64": np.arange(9, dtype=np.float64),
    "BF16": (np.arange(9, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16),
    "F16": np.arange(9, dtype=np.float16).view(np.uint16),
    "F8_E4M3FN": np.array([0, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50], np.uint8),
}


def lengths(width, nodes):
    """Elements: less and more than an eighth of which is as long as a slot, or as the most that a chunk may be."""
    borders = (SLOT, SLOT // nodes // LINE * LINE, 4 * SLOT // nodes, 2 * SLOT, 4 * SLOT)
    found = {8 * border // width + more for border in borders for more in (-1, 0, 1, LINE // width + 1)}
    return sorted(found | {4 * 8 * SLOT // width + 3, 70 * SLOT // width + 1})


def close(ranks):
    """Reductions leave alone what lies behind the slots: the receive buffers of an all_gather."""
    recv_buffers = (ranks.size - 1) * SLOTS * SLOT
    for end in ranks.ends:
        assert not any(ranks.ffi.buffer(ranks.ffi.cast("char *", end - recv_buffers), recv_buffers)[:])
    ranks.close()


def check_sums(ranks, bits, how, count):
    """all_reduce, and reduce to the last rank in its place."""
    ones = np.random.default_rng(count).integers(0, 2, (ranks.size, count))
    ins, total = [bits[row].copy() for row in ones], bits[ones.sum(0)]
    outs, hows, root = [np.zeros(count, bits.dtype) for _ in ins], [how] * ranks.size, ranks.size - 1
    ranks.reduced("all_reduce", ins, outs, hows, [count])
    assert all((out == total).all() for out in outs), ("all_reduce", count)
    ranks.reduced("reduce", ins, ins, hows, [count], root)
    assert (ins[root] == total).all(), ("reduce", count)
    assert all((ins[rank] == bits[ones[rank]]).all() for rank in range(root)), ("reduce, what is read", count)


@pytest.mark.parametrize(
    ("dtype", "premul"), [*((dtype, None) for dtype in COUNTS), *((dtype, 1.0) for dtype in COUNTS if dtype != "I8")]
)
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_all_lengths(shim_of_all_ranks, nodes, dtype, premul):
    ranks = Ranks(shim_of_all_ranks, nodes, SLOTS, SLOT, list(range(nodes)))
    for count in lengths(COUNTS[dtype].itemsize, nodes):
        check_sums(ranks, COUNTS[dtype], ranks.reduction(dtype, premul=premul), count)
    close(ranks)


def check_blocks(ranks, bits, how, counts, in_place):
    """A reduce_scatter."""
    begins = np.cumsum([0, *counts])
    ones = np.random.default_rng(begins[-1]).integers(0, 2, (ranks.size, begins[-1]))
    ins, total = [bits[row].copy() for row in ones], bits[ones.sum(0)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(begins)]
    outs = [whole[part] if in_place else np.zeros(part.stop - part.start, bits.dtype)
            for whole, part in zip(ins, parts, strict=True)]  # fmt: skip
    ranks.reduced("reduce_scatter", ins, outs, [how] * ranks.size, counts)
    for rank, (out, part) in enumerate(zip(outs, parts, strict=True)):
        assert (out == total[part]).all(), (counts, rank)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("dtype", COUNTS)
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_blocks_of_all_lengths(shim_of_all_ranks, nodes, dtype, in_place):
    """Of one length, and of many."""
    ranks = Ranks(shim_of_all_ranks, nodes, SLOTS, SLOT, list(range(nodes)))
    for count in lengths(COUNTS[dtype].itemsize, nodes):
        for counts in ([count] * nodes, [count * rank // (nodes - 1) for rank in range(nodes)]):
            check_blocks(ranks, COUNTS[dtype], ranks.reduction(dtype), counts, in_place)
    close(ranks)


#: Of a rank's data to each other one, from where it goes in long messages, and how many nodes do that.
LONG, FEW_NODES = 16 << 20, (3, 5)


@pytest.mark.parametrize("operation", ["broadcast", "all_gather"])
@pytest.mark.parametrize(
    ("nodes", "more"), [(2, 5), *((nodes, more) for nodes in FEW_NODES for more in (-1, 5)), (6, 5)]
)
def test_long_messages(shim_of_all_ranks, nodes, more, operation):
    """From one border on; between two nodes, and many, never."""
    ranks, size = Ranks(shim_of_all_ranks, nodes, SLOTS, 64 << 10, list(range(nodes))), LONG + more
    blocks = 1 if operation == "all_gather" else nodes - 1
    block = np.random.default_rng(nodes).integers(0, 255, blocks * size, np.uint8)
    ins = [block ^ np.uint8(rank) for rank in range(nodes)]
    outs = [np.tile(own, 1 if operation == "broadcast" else nodes) for own in ins]
    source, target = ([array.ctypes.data for array in arrays] for arrays in (ins, outs))
    ranks.of_all({
        "broadcast": lambda rank, _: ranks.broadcast(rank, target[rank], block.size, 1),
        "all_gather": lambda rank, _: ranks.gather(rank, source[rank], target[rank], size),
    }[operation])  # fmt: skip
    expected = ins[1] if operation == "broadcast" else np.concatenate(ins)
    assert all((out == expected).all() for out in outs)
    assert (max(length for *_, length in ranks.messages()) > 1 << 20) == (more > 0 and nodes in FEW_NODES)
    ranks.close()
