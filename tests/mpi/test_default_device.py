"""The default device and dtype are the user's: what mpiplus makes for itself is on the CPU, whatever they are."""

from __future__ import annotations

import inside
import pytest
import torch
import torch.distributed as dist
from windows import HAS_WINDOWS, WHY_NOT

import torchmpi_plugin


@pytest.mark.parametrize("detail", [False, True])
def test_on_meta(detail: bool, new_group, world) -> None:
    group = new_group(None)
    inside.calls(group).compares = detail and world.size > 1  # as under TORCH_DISTRIBUTED_DEBUG=DETAIL
    tensor, sparse = torch.ones(3), torch.eye(3).to_sparse_coo()
    strided = torch.zeros(3, 2)[:, 0]
    with torch.device("meta"):
        dist.barrier(group)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(sparse, group=group)
        dist.broadcast(strided, group=group, group_src=0)
        torchmpi_plugin.monitored_barrier(group)
    assert tensor.tolist() == [world.size] * 3
    assert torch.equal(sparse.to_dense(), world.size * torch.eye(3))


@pytest.mark.skipif(not HAS_WINDOWS, reason=WHY_NOT)
def test_windows_on_meta(new_group, world) -> None:
    group = new_group(None)
    tensor = torch.zeros(4)
    with torch.device("meta"):
        memory = group.allocate_tensor(4, dtype=torch.float32, device="cpu")
        window, other = group.new_window(tensor), group.new_window(memory)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        window.put(torch.full((4,), float(world.rank), device="cpu"), right, 0, False)
        window.signal(right, False)
        window.wait_signal(left, False)
        window.tensor_deregister()
        other.tensor_deregister()
    assert tensor.tolist() == [left] * 4


@pytest.mark.parametrize("with_sizes", [False, True])
def test_all_to_all_single_of_one_number(with_sizes: bool, group, world) -> None:
    """It is one row: it can go to one rank, and cannot be divided among several."""
    given, taken = torch.tensor(5.0), torch.tensor(0.0)
    sizes = [1] + [0] * (world.size - 1)
    if with_sizes and world.rank == 0:
        dist.all_to_all_single(taken, given, sizes, sizes)
        assert taken.item() == 5
    elif with_sizes:  # the others send nothing, and to rank 0 nothing
        dist.all_to_all_single(torch.empty(0), torch.empty(0), [0] * world.size, [0] * world.size)
    elif world.size == 1:
        dist.all_to_all_single(taken, given)
        assert taken.item() == 5
    else:
        with pytest.raises(ValueError, match=r"all_to_all_single: dimension 0 of the input \(1\) cannot be divided"):
            dist.all_to_all_single(taken, given)
