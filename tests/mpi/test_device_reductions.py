"""Reductions on the device, which are two exchanges with a kernel in between: what can come in between, too.

Their results are in test_cuda.py's tables, as the direct path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import inside
import pytest
import torch
import torch.distributed as dist
from fake_cuda import DeviceTensor, Driver, on_device
from groups import Group, assert_usable, only_up_to

from torchmpi_plugin.group import device_reductions

pytestmark = only_up_to(3)
COUNT = 600_000  # 2.4 MB: on the device by default
FEW = 10  # messages that MPI lets go of although nobody takes them, so that nothing is left at the end


@pytest.fixture
def direct(new_group, world, driver: Driver) -> Iterator[Callable[..., dist.ProcessGroup]]:
    """Makes groups whose tensors MPI is handed, as far as they are on the device."""

    def make(seconds: float = 30) -> dist.ProcessGroup:
        group = new_group(list(world.ranks), timeout=timedelta(seconds=seconds))
        inside.let_mpi_reach_devices([group])
        return group

    with driver.on_stream(kernel_us=300):
        yield make


def mine(driver: Driver, world: Group, count: int = COUNT) -> torch.Tensor:
    return on_device(driver, torch.full((count,), world.rank + 1.0))


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def total(world: Group) -> list[float]:
    return [sum(range(1, world.size + 1))]


def test_destroyed_before_it_is_over(direct, driver: Driver, world: Group) -> None:
    """The group waits for both halves, and its communicator goes with it."""
    group = direct()
    tensors = [mine(driver, world) for _ in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    group.shutdown()
    assert group.communicator.freed
    assert [tensor.unique().tolist() for tensor in tensors] == [total(world)] * 3
    assert all(work.is_success() for work in works)


@pytest.mark.parametrize("sync", [True, False])
def test_kernel_that_fails(sync: bool, direct, driver: Driver, world: Group, monkeypatch) -> None:
    """On one rank: that one is told why, the others at once on which; other groups go on."""
    group = direct()

    inside.stage_no_reductions(monkeypatch)
    if world.rank == 0:
        monkeypatch.setattr(device_reductions, "combine", no_memory)
    tensor = mine(driver, world, FEW)
    with pytest.raises(dist.DistBackendError) as failure:
        work = dist.all_reduce(tensor, group=group, async_op=not sync)
        work.wait()
    told = str(failure.value)
    if world.rank == 0:
        assert "on cuda:0 failed on rank 0: CUDA out of memory" in told
    else:
        assert "all_reduce: CUDA_ERROR_OUT_OF_MEMORY: out of memory (2) on rank 0" in told
    if world.rank == 0:
        with pytest.raises(dist.DistBackendError, match="make a new group"):
            dist.all_reduce(tensor, group=group)
    assert_usable()


def in_place(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def of_blocks(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    size = dist.get_world_size(group)
    tensor = tensor[: tensor.numel() // size * size]
    dist.reduce_scatter_tensor(tensor[: tensor.numel() // size], tensor, group=group)


def from_first(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(tensor, 0, group=group)


def told_of_no_memory(call: Callable, group: dist.ProcessGroup, world: Group) -> None:
    """Before anything is sent: rank 0 is told how much it is, the others who lacks it."""
    wanted = dist.DistBackendError if world.rank else torch.OutOfMemoryError
    with pytest.raises(wanted, match="rank 0 had no memory" if world.rank else "CUDA out of memory"):
        call(group)


def goes_on(group: dist.ProcessGroup, world: Group, driver: Driver) -> None:
    tensor = mine(driver, world)
    dist.all_reduce(tensor, group=group)
    assert tensor.unique().tolist() == total(world)


@pytest.mark.parametrize("call", [in_place, of_blocks, from_first])
@pytest.mark.parametrize("what", [device_reductions, DeviceTensor], ids=["to reduce in", "for a copy"])
def test_no_memory_on_one_rank(what: Any, call: Callable, direct, driver, world, monkeypatch) -> None:
    """Or for a copy of a tensor that has gaps."""
    group, tensor = direct(), mine(driver, world, 2 * COUNT)
    if what is DeviceTensor:
        tensor = tensor[::2]
    elif call is from_first:
        return
    with monkeypatch.context() as patch:
        if world.rank == 0:
            patch.setattr(what, "contiguous" if what is DeviceTensor else "spaces_for", no_memory)
        told_of_no_memory(lambda group: call(tensor, group), group, world)
    goes_on(group, world, driver)


def test_no_memory_for_one_of_several(direct, driver, world, monkeypatch) -> None:
    """The calls that come after it fail too."""
    group, spaces_for, calls = direct(), device_reductions.spaces_for, []
    tensors = [mine(driver, world) for _ in range(3)]

    def second_fails(*given: Any) -> Any:
        calls.append(given)
        return no_memory() if len(calls) == 2 else spaces_for(*given)

    def together(group: dist.ProcessGroup) -> None:
        group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()

    with monkeypatch.context() as patch:
        if world.rank == 0:
            patch.setattr(device_reductions, "spaces_for", second_fails)
        told_of_no_memory(together, group, world)
    goes_on(group, world, driver)
