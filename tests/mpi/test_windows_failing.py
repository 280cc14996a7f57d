"""Windows: wrong arguments, ranks that disagree or do not come, and groups that end while a window is open."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from groups import only_up_to
from torch.distributed import DistBackendError
from windows import HAS_WINDOWS, WHY_NOT, meet, memory

from torchmpi_plugin.group import registration

pytestmark = [only_up_to(3), pytest.mark.skipif(not HAS_WINDOWS, reason=WHY_NOT)]


def test_wrong_arguments(kind: str, group) -> None:
    """All of them raise here, nothing is sent, and the window goes on."""
    size = group.size()
    window = group.new_window()
    for tensor, error, words in (
        (torch.zeros(4, 4).t(), ValueError, "contiguous"),
        (torch.zeros(3, dtype=torch.complex64).conj(), ValueError, "contiguous"),
        (torch.zeros(3, device="meta"), ValueError, "meta"),
        (torch.eye(3).to_sparse(), ValueError, "dense"),
        ([1.0], TypeError, "torch.Tensor"),
    ):
        with pytest.raises(error, match=words):
            window.tensor_register(tensor)
        with pytest.raises(error, match=words):
            group.new_window(tensor)
    target = memory(group, kind, 4)
    window.tensor_register(target)
    ones = torch.ones(2)
    for arguments, error, words in (
        ((ones, size, 0, False), ValueError, f"put: rank {size} is not in the group"),
        ((ones, -1, 0, False), ValueError, "rank -1 is not in the group"),
        ((ones, 0, 3, False), ValueError, "elements 3 to 5 are not in the tensor of rank 0, which has 4"),
        ((ones, 0, -1, False), ValueError, "elements -1 to 1 are not"),
        ((torch.empty(0), 0, 5, True), ValueError, "elements 5 to 5 are not"),
        ((ones.double(), 0, 0, False), TypeError, "torch.float32, not of torch.float64"),
        ((ones.to("meta"), 0, 0, False), ValueError, "meta"),
        ((ones, 0, 0.5, False), TypeError, "float|index|integer"),
        (("ones", 0, 0, False), TypeError, "torch.Tensor"),
    ):
        with pytest.raises(error, match=words):
            window.put(*arguments)
    for operation in (window.signal, window.wait_signal):
        with pytest.raises(ValueError, match=f"rank {size} is not in the group"):
            operation(size, False)
    for operation in (window.map_remote_tensor, window.get_attr):
        with pytest.raises(ValueError, match="rank -1 is not in the group"):
            operation(-1)
    meet(window, group)
    assert target.tolist() == [0.0] * 4
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_register_different_windows(kind: str, new_group) -> None:
    """Everybody is told, and the group goes on."""
    group = new_group(None)
    first, second = group.new_window(), group.new_window()
    with pytest.raises(DistBackendError, match=r"the ranks disagree: .* rank \d registers a tensor with number"):
        (first if group.rank() == 0 else second).tensor_register(memory(group, kind, 1))
    for window in (first, second):
        window.tensor_register(memory(group, kind, 1))
        meet(window, group)
        window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["tensor_register", "tensor_deregister"])
def test_a_rank_that_does_not_come(call: str, kind: str, new_group, channel) -> None:
    group = new_group(None, timeout=timedelta(seconds=1))
    window = group.new_window()
    tensor = memory(group, kind, 1)
    if call == "tensor_deregister":
        window.tensor_register(tensor)
    if group.rank() == 0:
        channel.Barrier()
        finish_late(call, group)
        return
    with pytest.raises(DistBackendError, match=rf"{call}.* timed out on rank \d.*rank 0\b"):
        getattr(window, call)(*([tensor] if call == "tensor_register" else []))
    with pytest.raises(DistBackendError, match="out of step"):
        window.signal(0, False) if call == "tensor_deregister" else window.tensor_register(tensor)
    channel.Barrier()


def finish_late(call: str, group) -> None:
    """Let what the others gave up come to its end, so that nothing stays pending."""
    with contextlib.suppress(DistBackendError):
        if call == "tensor_register":
            record = torch.zeros(registration.RECORD_BYTES, dtype=torch.uint8)
            dist.all_gather_into_tensor(record.repeat(group.size()), record, group=group)
        else:
            dist.barrier(group)


@pytest.mark.mpi(min_size=2)
def test_destroyed_with_a_window_open(kind: str, new_group, channel) -> None:
    """The waits of it fail, its tensor is the user's again, and what comes late does no harm."""
    group = dist.new_group(None)
    target = memory(group, kind, 4)
    window = group.new_window(target)
    waiting = window.wait_signal(group.rank(), True)
    meet_others = [rank for rank in range(group.size()) if rank != group.rank()]
    if group.rank() == 0:
        dist.destroy_process_group(group)
    channel.Barrier()
    if group.rank() != 0:
        for rank in meet_others:
            window.put(torch.ones(4), rank, 0, True)
            window.signal(rank, True)
        dist.destroy_process_group(group)
    with pytest.raises(DistBackendError, match=r"wait_signal from rank .* is destroyed"):
        waiting.wait()
    for operation in (lambda: window.signal(0, False), window.tensor_deregister, lambda: window.map_remote_tensor(0)):
        with pytest.raises(DistBackendError, match="the window's group is destroyed"):
            operation()
    target.fill_(3)
    channel.Barrier()
    new = new_group(None)
    again = new.new_window(target)
    meet(again, new)
    again.tensor_deregister()


def test_deregistering_ends_waits(kind: str, group) -> None:
    window = group.new_window(memory(group, kind, 1))
    waiting = window.wait_signal(group.rank(), True)
    window.tensor_deregister()
    with pytest.raises(DistBackendError, match="the tensor was deregistered"):
        waiting.wait()
