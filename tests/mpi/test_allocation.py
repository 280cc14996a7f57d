"""allocate_tensor: memory that the other ranks of a node can map, and that goes with its last tensor."""

from __future__ import annotations

import contextlib
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from cases import DTYPES
from groups import only_up_to
from inside import pending
from torch import nn
from windows import SHARES

pytestmark = only_up_to(2)


def descriptors() -> list[str]:
    """Of memory like this that is in use; Python's mmap keeps one of its own. Other threads open and close files."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == "/memfd:mpiplus (deleted)":
                found.append(name)
    return found


def test_what_comes_out(group) -> None:
    for dtype in DTYPES:
        for numel in (0, 1, 5000):
            tensor = group.allocate_tensor(numel, dtype=dtype, device=torch.device("cpu"))
            assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((numel,), dtype, True)
            assert not tensor.view(torch.uint8).any()
    trained = group.allocate_tensor(4, dtype=torch.float32, device="cpu").requires_grad_()
    trained.sum().backward()
    assert trained.grad is not None


def test_it_goes_with_the_last_tensor(group) -> None:
    # Nobody is woken for an operation that was cancelled: the engine forgets it, and what the error of an earlier test
    # refers to, when its background looks next.
    while pending(group):
        time.sleep(0.01)
    before = len(descriptors())
    tensors = [group.allocate_tensor(10, dtype=torch.int64, device="cpu") for _ in range(5)]
    assert len(descriptors()) == before + 2 * 5 * SHARES
    views = [tensor[3:].view(torch.uint8) for tensor in tensors]
    del tensors
    assert len(descriptors()) == before + 2 * 5 * SHARES
    del views
    assert len(descriptors()) == before


def test_only_on_the_cpu(group) -> None:
    assert group.supports_tensor_alloc(torch.device("cpu"))
    assert group.supports_tensor_alloc("cpu")
    for device in ("cuda", torch.device("cuda:0"), 0):
        assert not group.supports_tensor_alloc(device)
    with pytest.raises(ValueError, match="on the CPU, not on cuda"):
        group.allocate_tensor(1, dtype=torch.float32, device="cuda")
    with pytest.raises(ValueError, match="must not be negative"):
        group.allocate_tensor(-1, dtype=torch.float32, device="cpu")


def test_more_than_there_is(group) -> None:
    if not SHARES:
        pytest.skip("MPIPLUS_COLLECTIVES=mpi-only: ordinary memory")
    before = len(descriptors())
    with pytest.raises(MemoryError, match="ranks can share"):
        group.allocate_tensor(1 << 60, dtype=torch.float32, device="cpu")
    assert len(descriptors()) == before


def test_fsdp_takes_its_buffers_from_the_group(group) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp.FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip(f"torch {torch.__version__} has no such switch")

    def train(from_group: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
        fsdp.fully_shard(model, mesh=mesh)
        model.set_allocate_memory_from_process_group_for_comm(from_group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(group.rank())
        for _ in range(3):
            model(torch.randn(8, 16, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]

    for mine, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(mine, theirs)
