"""Exchanges on one node: through slots of shared memory, or as messages, and alike on all ranks."""

import itertools

import numpy as np
import pytest
from ranks_in_one_process import CANCELLED, DONE, FAILED, MISMATCH, PENDING, Ranks

SLOTS, LINE, GUARD = 4, 64, 8


def piece(size, slot):
    """Bytes of one block in a slot, and how many blocks one carries."""
    room = slot - -(-16 * size // LINE) * LINE
    places = min(size - 1, room // LINE)
    return room // places // LINE * LINE, places


class Exchange:
    """Of every rank what it sends, and where what it gets goes; its own block too. `lengths[i][j]`: from i to j."""

    def __init__(self, ranks, lengths, seed=0):
        self.ranks, size = ranks, ranks.size
        dice = np.random.default_rng(seed)
        self.sent = [[dice.integers(0, 256, length, np.uint8) for length in row] for row in lengths]
        self.received = [[np.full(lengths[i][j] + GUARD, 7, np.uint8) for i in range(size)] for j in range(size)]

    def start(self, rank, expected=None):
        """`expected`: lengths in place of the right ones."""
        send, receive = self.sent[rank], self.received[rank]
        return self.ranks.begin(
            "exchange",
            self.ranks.groups[rank],
            inputs=[block.ctypes.data for block in send],
            input_sizes=[len(block) for block in send],
            outputs=[block.ctypes.data for block in receive],
            output_sizes=expected or [len(receive[other]) - GUARD for other in range(self.ranks.size)],
        )

    def check(self):
        for to, blocks in enumerate(self.received):
            for source, block in enumerate(blocks):
                assert (block[:-GUARD] == self.sent[source][to]).all(), (source, to)
                assert (block[-GUARD:] == 7).all(), ("written behind its end", source, to)


def run(ranks, lengths):
    """Two of them, with a sum between and one behind; the messages of the first."""
    ranks.messages()
    first, second = Exchange(ranks, lengths), Exchange(ranks, [*zip(*lengths, strict=True)], 1)
    ones, how = [np.ones(5, np.float32) for _ in ranks.groups], ranks.reduction("F32")

    def add(rank):
        return ranks.reduce("all_reduce", rank, ones[rank], ones[rank], how, [5])

    # One rank calls them all before another has called any.
    ops = [[first.start(rank), add(rank), second.start(rank), add(rank)] for rank in range(ranks.size)]  # fmt: skip
    for call in zip(*ops, strict=True):
        assert set(ranks.finish(call)) == {DONE}
        ranks.release(call)
    first.check()
    second.check()
    assert all((array == ranks.size**2).all() for array in ones)
    return len(ranks.messages())


@pytest.mark.parametrize("slot", [LINE, 256, 1024, 4096])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 40])
def test_equal_blocks(shim_of_all_ranks, size, slot):
    """At the borders of pieces and of what few chunks carry. Where a slot holds little but the lengths: messages."""
    ranks = Ranks(shim_of_all_ranks, size, SLOTS, slot)
    carries = size > 1 and -(-16 * size // LINE) * LINE <= slot // 2
    borders = [count * piece(size, slot)[0] for count in (1, 4, 8, 40 if size < 9 else 9)] if carries else [slot]
    for length in sorted({0, 1, *(border + more for border in borders for more in (-1, 0, 1))}):
        messages = run(ranks, [[length] * size] * size)
        assert messages == (0 if carries or not length else 2 * size * (size - 1)), length
    ranks.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_blocks_of_any_length(shim_of_all_ranks, size, seed):
    """Some of them empty, and the own ones too."""
    dice = np.random.default_rng([size, seed])
    ranks = Ranks(shim_of_all_ranks, size, SLOTS, 1024)
    for most in (30, 3000, 30_000):
        lengths = dice.integers(0, most, (size, size)) * dice.integers(0, 2, (size, size))
        run(ranks, lengths.tolist())
    ranks.close()


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_one_long_block_of_many_goes_in_a_message(shim_of_all_ranks, size):
    """And up to so many chunks, or where the slots are a quarter full, none does."""
    ranks = Ranks(shim_of_all_ranks, size, SLOTS, 1024)
    few = 8 * piece(size, 1024)[0]
    for length in (few, few + 1):
        lengths = [[0] * size for _ in range(size)]
        lengths[size - 1][0] = length
        assert (run(ranks, lengths) > 0) == (length > few and size > 2)  # of two ranks it is half of all there is
        gathered = [[length if to == 0 else 0 for to in range(size)] for _ in range(size)]
        assert (run(ranks, gathered) > 0) == (length > few and size > 4)
    ranks.close()


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (3, 3), (5, 5), *itertools.product((2, 3, 5, 9, 65), (1, 2))])
def test_a_disagreement_touches_nothing(shim_of_all_ranks, size, per_node):
    """Calls of different numbers of chunks, which others follow; what nodes have sent early is dropped.

    The groups of more than 64 ranks send nothing early.
    """
    nodes = None if per_node == size else [rank // per_node for rank in range(size)]
    ranks = Ranks(shim_of_all_ranks, size, SLOTS, 1024, nodes)
    for length in (8, 3000) if nodes else (8, 3000, 20_000):
        wrong = Exchange(ranks, [[length] * size] * size)
        ops = [wrong.start(rank, [length // 2] * size if rank == 0 else None) for rank in range(size)]
        assert set(ranks.finish(ops)) == {FAILED}
        assert {ranks.failure(op)[0] for op in ops} == {MISMATCH}
        assert nodes or {ranks.failure(op)[2].own for op in ops} == {length // 2}
        ranks.release(ops)
        others = [block for rank, blocks in enumerate(wrong.received) for r, block in enumerate(blocks) if r != rank]
        assert all((block == 7).all() for block in others)
        messages = run(ranks, [[length] * size] * size)
        assert nodes or messages == 0
    ranks.close()


def test_what_comes_behind_an_agreement_that_failed_fails_alike(shim_of_all_ranks):
    """It took what had not come for the answer."""
    ranks = Ranks(shim_of_all_ranks, 2, SLOTS, 1024, [0, 1])
    exchanges = [Exchange(ranks, [[8, 8]] * 2) for _ in range(3)]
    ops = [exchange.start(0) for exchange in exchanges]
    for op, deaf in zip(ops, (2, 0, 0), strict=True):
        ranks.lib.set_deaf(ranks.comms[0], deaf)
        assert ranks.finish([op]) == [FAILED]
        assert ranks.failure(op)[0] == ranks.lib.MPP_FAILURE_MPI
    ranks.release(ops)


def test_who_waits_for_a_call_is_idle(shim_of_all_ranks):
    """Who makes it rings, but only on the same node: MPP_RINGS, and MPP_IDLE."""
    for nodes, idle in ((None, 2), ([0, 1], 1)):
        ranks = Ranks(shim_of_all_ranks, 2, SLOTS, 1024, nodes)
        exchange = Exchange(ranks, [[8, 8]] * 2)
        ops = [exchange.start(0)]
        assert (ranks.state(ops[0]), ranks.lib.idle_of(ops[0])) == (PENDING, idle)
        ops.append(exchange.start(1))
        assert ranks.finish(ops) == [DONE] * 2
        ranks.release(ops)
        ranks.close()


def test_a_receive_between_nodes_is_taken_back(shim_of_all_ranks):
    """Of two blocks one never comes; where it was to go nothing is written."""
    ranks = Ranks(shim_of_all_ranks, 2, SLOTS, 1024, [0, 1])
    ranks.lib.lose_messages_of(6000)
    exchange = Exchange(ranks, [[8, 5000], [6000, 8]])
    ops = [exchange.start(rank) for rank in range(2)]
    assert ranks.finish([ops[1]]) == [DONE]
    assert ranks.state(ops[0]) not in (DONE, FAILED)
    ranks.lib.mpp_cancel(ops[0])
    assert ranks.finish([ops[0]]) == [FAILED]
    assert ranks.failure(ops[0])[0] == CANCELLED
    assert (exchange.received[0][1] == 7).all()
    ranks.lib.lose_messages_of(-1)
    ranks.release(ops)
    ranks.close()
