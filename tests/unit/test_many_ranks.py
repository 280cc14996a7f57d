"""More ranks on one node than a slot of shared memory has cache lines."""

import numpy as np
import pytest
from ranks_in_one_process import Ranks

from torchmpi_plugin.communicator import shared_memory

INPUTS = 7  # rank r contributes input r % INPUTS


@pytest.fixture(params=[256, 512, 513, 1024, 4096])
def ranks(request, shim_of_all_ranks):
    made = Ranks(shim_of_all_ranks, request.param, shared_memory.SLOTS, shared_memory.slot_bytes(request.param))
    yield made
    made.close()


def contributions(size, count):
    """The input of each rank, and their sum."""
    inputs = [np.arange(count, dtype=np.int32) * (k + 1) + k for k in range(INPUTS)]
    times = [len(range(k, size, INPUTS)) for k in range(INPUTS)]
    total = sum(array * n for array, n in zip(inputs, times, strict=True))
    return [inputs[rank % INPUTS] for rank in range(size)], total


def test_reduce_scatter(ranks):
    size = ranks.size
    most = 40 if size < 2000 else 16  # elements: up to three pieces, or one where the ranks are many
    counts = [block * 7 % most + (block % 3 > 0) for block in range(size)]
    begins = np.concatenate([[0], np.cumsum(counts)])
    inputs, total = contributions(size, begins[-1])
    outs = [np.full(count, -1, np.int32) for count in counts]
    ranks.reduced("reduce_scatter", inputs, outs, [ranks.reduction("I32")] * size, counts)
    for rank, out in enumerate(outs):
        assert out.tolist() == total[begins[rank] : begins[rank + 1]].tolist(), f"rank {rank}"


@pytest.mark.parametrize("count", [3, 5000])
def test_all_reduce(ranks, count):
    inputs, total = contributions(ranks.size, count)
    outs = [np.empty(count, np.int32) for _ in ranks.groups]
    ranks.reduced("all_reduce", inputs, outs, [ranks.reduction("I32")] * ranks.size, [count])
    assert all((out == total).all() for out in outs)


def test_all_gather(ranks):
    tensors = np.arange(ranks.size, dtype=np.int32)
    outs = [np.empty(ranks.size, np.int32) for _ in ranks.groups]
    ranks.of_all(lambda rank, _: ranks.gather(rank, tensors[rank:].ctypes.data, outs[rank].ctypes.data, 4))
    assert all((out == tensors).all() for out in outs)


@pytest.mark.parametrize("size", [1, 2, 256, 257, 512, 513, 1024, 4096, 4097, 20_000])
def test_size_of_a_segment(size, shim_of_all_ranks):
    slot = shared_memory.slot_bytes(size)
    assert slot % 64 == 0 and 4096 <= slot <= 256 << 10
    length = shim_of_all_ranks.lib.mpp_segment_size(size, size, shared_memory.SLOTS, slot)
    counters = length - size * shared_memory.SLOTS * slot
    assert 0 < counters <= 1024 * size
    if size <= 4096:
        assert length - counters <= shared_memory.SEGMENT_LIMIT


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (8, 4096), (-1, 4096), (4, 0), (4, 32), (4, 100)])
def test_a_ring_that_cannot_be(slots, slot_bytes, shim_of_all_ranks):
    lib, ffi = shim_of_all_ranks.lib, shim_of_all_ranks.ffi
    group, segment = lib.mpp_group_new(0, 0, 1, 1000, 1000, 0), ffi.new("char[]", 100_000)
    assert lib.mpp_group_attach(group, int(ffi.cast("uintptr_t", segment)), slots, slot_bytes, ffi.NULL, 0) == -1
    lib.mpp_group_release(group)
