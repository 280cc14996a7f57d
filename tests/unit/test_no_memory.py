"""A rank that has no memory for a call over shared memory: all ranks learn of it, and the next call is right."""

import contextlib
import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from ranks_in_one_process import CANCELLED, DONE, FAILED, MEMORY, MISMATCH, PENDING, Ranks

from torchmpi_plugin.tensors import dtypes

SLOT = 4096
KINDS = ("barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter")
SCRATCH = np.zeros(16, np.uint8)
NO_SIZES = 2**64 - 1, 2**64 - 1
LARGE = 200, 1 << 20  # bytes of the record of an operation, and more than of that which reports a failure


@pytest.fixture(params=[1, 2, 3, 5])
def ranks(request, shim_of_all_ranks):
    made = Ranks(shim_of_all_ranks, request.param, 4, SLOT)
    yield made
    made.close()


@contextlib.contextmanager
def refusing(ranks, sizes):
    """Allocations of so many bytes (from, to) fail; None: none does."""
    ranks.lib.refuse_allocations(*(sizes or NO_SIZES))
    try:
        yield
    finally:
        ranks.lib.refuse_allocations(*NO_SIZES)


def started(ranks, rank, kind, count, refused=None):
    """One rank's call, whose allocations of so many bytes (from, to) fail; the operation, its result, what that must
    be."""
    size, how = ranks.size, ranks.reduction("I32")
    theirs = [np.arange(count, dtype=np.int32) + r for r in range(size)]
    mine, out, total = theirs[rank], np.full(count * size, -1, np.int32), sum(theirs)
    source, at, lists = mine.ctypes.data, out.ctypes.data, [out[r * count :].ctypes.data for r in range(size)]
    begin = functools.partial(ranks.begin, group=ranks.groups[rank])
    call, wanted = {
        "barrier": (lambda: begin("barrier"), out.copy()),
        "broadcast": (lambda: begin("broadcast", input=source, output=source, count=4 * count, root=0), out.copy()),
        "all_reduce": (lambda: begin("allreduce", input=source, output=at, count=count, how=how), total),
        "all_gather": (
            lambda: begin("allgather", input=source, outputs=lists, output_sizes=[4 * count] * size),
            np.concatenate(theirs),
        ),
        "reduce_scatter": (
            lambda: begin("reduce_scatter", inputs=[source] * size, output=at, input_sizes=[count] * size, how=how),
            total,
        ),
    }[kind]
    with refusing(ranks, refused):
        op = call()
    wanted = np.concatenate([wanted, out[len(wanted) :]])
    return SimpleNamespace(op=op, out=out, wanted=wanted, keep=mine, rank=rank)


def check_failed(ranks, call, without):
    """``call`` has failed on its rank, since the ranks in ``without`` had no memory."""
    failure, rank, theirs = ranks.failure(call.op)
    assert (call.out == -1).all(), "something was written"
    if call.rank in without:
        assert failure == MEMORY
        assert rank == 1, "nobody is told that the call has its place in the order, so the group would end here"
        return
    assert failure == MISMATCH
    assert rank in without
    assert "no memory" in dtypes.describe_disagreement(rank, theirs, theirs, -1)


def check_done(ranks, calls):
    assert set(ranks.finish([call.op for call in calls])) == {DONE}
    assert all((call.out == call.wanted).all() for call in calls)
    ranks.release([call.op for call in calls])


def test_the_rank_without_memory_need_not_call_again(ranks):
    """Its failures behind a pending operation reach the others, who come later."""
    first = [started(ranks, 0, "all_reduce", 3000)]
    refused = [started(ranks, 0, "all_reduce", 3000, LARGE) for _ in range(3)]
    assert [ranks.failure(call.op)[0] for call in refused] == [MEMORY] * 3
    for rank in range(1, ranks.size):
        first.append(started(ranks, rank, "all_reduce", 3000))
    check_done(ranks, first)
    for _ in range(3):
        others = [started(ranks, rank, "all_reduce", 3000) for rank in range(1, ranks.size)]
        ranks.finish([call.op for call in others])
        for call in others:
            check_failed(ranks, call, {0})
        ranks.release([call.op for call in others])
    ranks.release([call.op for call in refused])
    check_done(ranks, [started(ranks, r, "broadcast", 10) for r in range(ranks.size)])


@pytest.mark.parametrize("seed", range(40))
def test_random_failures_in_flight(ranks, seed):
    """Ranks begin the same calls in an order of their own, some without memory, and wait for none of them before."""
    dice = random.Random(seed)
    chance = dice.choice([0.1, 0.5, 0.9])
    rows = [(dice.choice(KINDS), dice.choice([0, 1, 2000, 9000])) for _ in range(12)]
    without = [{r for r in range(ranks.size) if dice.random() < chance} for _ in rows]
    calls = [[] for _ in rows]
    for rank in dice.sample([r for r in range(ranks.size) for _ in rows], ranks.size * len(rows)):
        row = next(i for i, made in enumerate(calls) if all(call.rank != rank for call in made))
        has_lists = rows[row][0] in ("all_gather", "reduce_scatter") and rows[row][1]
        refused = dice.choice((LARGE, (8 * ranks.size, 8 * ranks.size))) if has_lists else LARGE  # itself, or its lists
        calls[row].append(started(ranks, rank, *rows[row], refused if rank in without[row] else None))
    for made, failing in zip(calls, without, strict=True):
        if not failing:
            check_done(ranks, made)
            continue
        ranks.finish([call.op for call in made])
        for call in made:
            check_failed(ranks, call, failing)
        ranks.release([call.op for call in made])
    check_done(ranks, [started(ranks, r, "all_reduce", 3000) for r in range(ranks.size)])


def test_an_aborted_group(ranks):
    if ranks.size == 1:
        pytest.skip("nobody to wait for")
    pending = started(ranks, 0, "all_reduce", 10)
    refused = [started(ranks, 0, "all_reduce", 10, LARGE) for _ in range(2)]
    assert ranks.state(pending.op) == PENDING
    ranks.lib.mpp_group_abort(ranks.groups[0])
    assert ranks.finish([pending.op]) == [FAILED]
    again = started(ranks, 0, "all_reduce", 10, LARGE)
    assert ranks.failure(again.op)[0] == MEMORY
    ranks.release([pending.op, again.op, *(call.op for call in refused)])
    assert ranks.lib.mpp_group_active(ranks.groups[0]) == 0


def test_a_closed_group(shim_of_all_ranks):
    """Its segment may be gone: nothing of it is touched."""
    ranks = Ranks(shim_of_all_ranks, 1, 4, SLOT)
    assert ranks.lib.mpp_group_close(ranks.groups[0]) == 0
    for kind in KINDS:
        late = started(ranks, 0, kind, 10)
        assert ranks.failure(late.op)[0] == CANCELLED
        ranks.release([late.op])
    ranks.close()


def exchange(ranks, rank, sent, refused=None):
    """One rank's exchange, in which all send to rank 0 what `sent` says, and rank 0 expects 8 bytes of each."""
    others = range(1, ranks.size)
    buffers = [SCRATCH.ctypes.data] * ranks.size
    sizes = [sent if rank else 0, *(0 for _ in others)], [0, *(8 if rank == 0 else 0 for _ in others)]
    lists = {"inputs": buffers, "outputs": buffers, "input_sizes": sizes[0], "output_sizes": sizes[1]}
    with refusing(ranks, refused):
        return ranks.begin("exchange", ranks.groups[rank], **lists)


def test_an_exchange_without_memory(ranks):
    if ranks.size == 1:
        pytest.skip("the exchange would be begun, and there is no MPI here")
    last = ranks.size - 1
    for refused in (LARGE, (16 * ranks.size, 16 * ranks.size), (8 * ranks.size, 8 * ranks.size)):
        ops = [exchange(ranks, r, 8, refused if r == last else None) for r in range(ranks.size)]
        assert set(ranks.finish(ops)) == {FAILED}
        assert [ranks.failure(op)[0] for op in ops] == [MISMATCH] * last + [MEMORY]
        assert [ranks.failure(op)[1] for op in ops[:last]] == [last] * last
        ranks.release(ops)
        check_done(ranks, [started(ranks, r, "all_reduce", 2000) for r in range(ranks.size)])


def test_an_exchange_that_is_aborted(ranks):
    """It is over only when its place in the order is, so that nothing waits for it that is gone."""
    if ranks.size == 1:
        pytest.skip("nobody to wait for")
    before, op, after = started(ranks, 0, "barrier", 1), exchange(ranks, 0, 8), started(ranks, 0, "barrier", 1)
    ranks.lib.mpp_cancel(op)
    assert [ranks.state(each) for each in (before.op, op, after.op)] == [PENDING] * 3
    ranks.lib.mpp_group_abort(ranks.groups[0])
    assert ranks.finish([before.op, op, after.op]) == [FAILED] * 3
    ranks.release([op, after.op, before.op])
    assert ranks.lib.mpp_group_active(ranks.groups[0]) == 0


def test_the_next_call_is_counted_as_what_it_is(ranks):
    """Whatever the one before it, which had no memory and so never began, would have been."""
    lib, ffi, group = ranks.lib, ranks.ffi, ranks.groups[0]
    assert lib.mpp_group_describe(group, b"")
    refused = []
    for failing, kind in (("all_reduce", "barrier"), ("broadcast", "all_gather")):
        lib.mpp_call_begins(1)
        refused.append(started(ranks, 0, failing, 10, LARGE))
        lib.mpp_call_returns(0)
        assert ranks.failure(refused[-1].op)[0] == MEMORY
        others = [started(ranks, rank, failing, 10) for rank in range(1, ranks.size)]
        ranks.finish([call.op for call in others])
        ranks.release([call.op for call in others])
        check_done(ranks, [started(ranks, rank, kind, 10) for rank in range(ranks.size)])
    ranks.release([call.op for call in refused])
    figures, late = ffi.new("uint64_t[]", 3 * lib.MPP_CALL_KINDS + 2), ffi.new("int64_t[]", ranks.size)
    assert lib.mpp_group_statistics(group, figures, late)
    counted = {kind for kind in range(lib.MPP_CALL_KINDS) if figures[3 * kind]}
    assert counted == {lib.MPP_BARRIER, lib.MPP_ALL_GATHER}


def test_a_window_that_listens_is_no_operation(ranks):
    """So a group with one has nothing pending, and can tell when its operations are over."""
    lib, group = ranks.lib, ranks.groups[0]
    memory = np.zeros(lib.mpp_counters_size(ranks.size), np.uint8)
    window = lib.mpp_window_new(group, 1, SCRATCH.ctypes.data, SCRATCH.nbytes, memory.ctypes.data)
    assert (lib.mpp_window_listen(window), lib.mpp_group_active(group), lib.mpp_window_close(window)) == (0, 0, 0)
    lib.mpp_window_release(window)
    assert lib.mpp_group_active(group) == 0
