"""Exceptions inside a ``with`` of ours or of torch's: the operations that follow leave everything as it was."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Callable
from typing import Any

import inside
import psutil
import pytest
import sampling
import torch
import torch.distributed as dist
from groups import API_MODE, only_up_to
from operation_table import TABLE
from torch.distributed.distributed_c10d import _coalescing_manager

from torchmpi_plugin import torch_internals
from torchmpi_plugin.mpi import runtime

pytestmark = [pytest.mark.skipif(API_MODE != "direct", reason="asks the group itself"), only_up_to(3)]
OPERATIONS = sampling.count(1000, 150)
CPU = torch.device("cpu")


class StopError(Exception):
    """What the tests raise."""


def ends(group: Any) -> None:
    """Before any operation of the block."""
    with _coalescing_manager(group, CPU):
        raise StopError


def ends_later(group: Any) -> None:
    """After operations that the group has collected."""
    with _coalescing_manager(group, CPU, async_ops=True):
        dist.all_gather([torch.empty(2) for _ in range(group.size())], torch.ones(2), group=group, async_op=True)
        raise StopError


def ends_in_an_operation(group: Any) -> None:
    with _coalescing_manager(group, CPU):
        dist.broadcast(torch.eye(2).to_sparse_csr(), group=group, group_src=0)


def ends_in_a_batch(group: Any) -> None:
    """A conjugate view, which the front end of torch 2.15 refuses."""
    tensor, taken = torch.ones(2, dtype=torch.complex64).conj(), torch.empty(2, dtype=torch.complex64)
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    receive = dist.P2POp(dist.irecv, taken, group=group, group_peer=left)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=group, group_peer=right), receive]):
        work.wait()
    raise StopError


def ends_within_another(group: Any) -> None:
    try:
        ends_later(group)
    finally:
        ends(group)


def ends_in_a_turn(group: Any) -> None:
    from torchmpi_plugin.dist import zero_first

    with zero_first(group.rank() == 0, group):
        raise StopError


def ends_in_chunks(group: Any) -> None:
    with inside.chunk_limit(64):
        dist.all_reduce(torch.ones(100), group=group)
        raise StopError


def ends_with_mpi_to_itself(group: Any) -> None:
    """Of the lock, which the engine's threads need afterwards."""
    with runtime.exclusive():
        raise StopError


BLOCKS = (
    *(ends_in_an_operation, ends_in_a_batch, ends_within_another),
    *(ends_in_a_turn, ends_in_chunks, ends_with_mpi_to_itself),
)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def operate(group: Any) -> None:
    for _ in range(OPERATIONS):
        dist.all_reduce(torch.ones(4096), group=group)
    dist.barrier(group)


@pytest.mark.cases(3)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("block", BLOCKS)
def test_the_next_operations_leave_nothing(block: Callable[[Any], None], new_group, monkeypatch) -> None:
    # It keeps some thousand entries.
    monkeypatch.setattr("torchmpi_plugin.diagnosis.flight_recorder.current", None)
    limit = runtime.shim().lib.mpp_get_chunk_limit()
    group = new_group(None)
    operate(group)
    with contextlib.suppress(StopError, ValueError, RuntimeError):
        block(group)
        pytest.fail("nothing was raised")
    dist.barrier(group)
    gc.collect()
    opened, pending, blocks = psutil.Process().num_fds(), len(inside.pending(group)), len(gc.get_objects())
    before, in_c = peak_kib(), inside.calls(group).in_c
    operate(group)
    gc.collect()
    assert inside.calls(group).coalescing is None
    assert runtime.shim().lib.mpp_get_chunk_limit() == limit
    assert psutil.Process().num_fds() <= opened
    assert len(inside.pending(group)) <= pending
    assert len(gc.get_objects()) - blocks < OPERATIONS / 4
    assert peak_kib() - before < OPERATIONS * 16 / 4  # each tensor has 16 KiB
    if torch_internals.tensor_exchange() is not None:
        assert inside.calls(group).in_c - in_c == OPERATIONS + 1


def test_a_block_goes_on_after_an_error_that_was_caught_in_it(new_group) -> None:
    group = new_group(None)
    tensors = [torch.ones(2), torch.ones(2)]
    with _coalescing_manager(group, CPU, async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=0)
            with pytest.raises(ValueError, match="dense"):
                dist.broadcast(torch.eye(2).to_sparse_csr(), group=group, group_src=0)
    assert "all_reduce" in TABLE and inside.calls(group).coalescing is None
    assert len(inside.works_of(manager.works[0])) == 2
    manager.wait()
