"""Failures of the driver, over the stand-in for it: every rank is told at once, and other groups go on."""

from __future__ import annotations

import itertools
import logging
import re
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fake_cuda
import inside
import pytest
import torch
import torch.distributed as dist
from fake_cuda import DeviceTensor, Driver, on_device
from groups import assert_usable, only_up_to
from patience import patient
from placements import A_NODE_EACH
from sampling import share
from test_between_devices import COUNT as LONGER
from test_between_devices import IPC, STAGED, new_pair, try_reading

from torchmpi_plugin.mpi import runtime
from torchmpi_plugin.tensors import device

pytestmark = only_up_to(3)
PIECE = fake_cuda.STAGE_BYTES
OUT_OF_MEMORY, INVALID_DEVICE, ILLEGAL_ADDRESS = 2, 101, 700
WORDS = {OUT_OF_MEMORY: "OUT_OF_MEMORY: out of memory", ILLEGAL_ADDRESS: "an illegal memory access"}


def test_no_such_device(driver: Driver) -> None:
    """Before anything is sent, so that the group can go on."""
    elsewhere: Any = SimpleNamespace(device=torch.device("cuda", 7))
    with pytest.raises(torch.AcceleratorError, match=r"use cuda:7: CUDA_ERROR_INVALID_DEVICE.* on rank 3") as raised:
        device.stage(*runtime.shim(), elsewhere, 0, 3, 0)
    assert raised.value.error_code == INVALID_DEVICE  # type: ignore[attr-defined]


def test_a_stream_that_is_captured(driver: Driver, world) -> None:
    tensor = on_device(driver, torch.ones(3))
    with driver.on_stream(kernel_us=0):
        driver.lib.fake_stream_capture(driver.stream, 1)
        with pytest.raises(RuntimeError, match="CUDA graph"):
            dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [world.size]


@pytest.mark.parametrize(("current", "count"), [(1, 2), (0, 2), (0, 1)])
def test_set_device_was_forgotten(current: int, count: int, driver: Driver, world, monkeypatch, caplog) -> None:
    """Once: the tensor is on another device, or on the one that local rank 0 has as well."""
    device._look_for_forgotten_set_device.cache_clear()
    monkeypatch.setattr(device.cuda, "current_device", lambda: current)
    monkeypatch.setattr(device.cuda, "device_count", lambda: count)
    tensor, place = on_device(driver, torch.ones(3)), world.process_group.communicator.place.local_rank
    with caplog.at_level(logging.WARNING, "torchmpi_plugin"):
        for _ in range(3):
            dist.all_reduce(tensor)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (current == 1 or (count > 1 and place > 0))
    words = "a tensor is on cuda:0 while the current device is cuda:1" if current else f"local rank {place} uses cuda:0"
    assert all(words in each and f"torch.cuda.set_device({place})" in each for each in told)


CALLS = (
    *("CtxPushCurrent", "StreamCreate", "EventCreate", "MemHostAlloc", "EventRecord", "StreamWaitEvent"),
    *("MemcpyDtoHAsync", "MemcpyHtoDAsync", "StreamQuery", "EventQuery"),
)
BETWEEN_DEVICES = ("IpcOpenMemHandle", "IpcGetMemHandle", "MemGetAddressRange", "PointerGetAttribute")
NAMES, COUNTS = ("all_reduce", "broadcast", "all_to_all_single"), (6, 6 * PIECE)
WALK = list(itertools.product(("one node",), NAMES, COUNTS, CALLS, range(3)))


@pytest.mark.mpi(min_size=2)
def test_what_torch_says_of_the_driver(driver: Driver, new_group, world, monkeypatch) -> None:
    """A copy that torch cannot make, before there is an operation: the others are told, and the group goes on."""
    group, error = new_group(list(world.ranks)), torch.AcceleratorError("CUDA error")
    error.error_code = ILLEGAL_ADDRESS  # type: ignore[attr-defined]
    tensor = on_device(driver, torch.ones(10))
    driver.drain()
    with monkeypatch.context() as patch:
        if world.rank == 1:
            patch.setattr(DeviceTensor, "contiguous", Mock(side_effect=error))
        wanted = (
            (torch.AcceleratorError, "CUDA error") if world.rank == 1 else (dist.DistBackendError, "700.* on rank 1")
        )
        with pytest.raises(wanted[0], match=wanted[1]):
            dist.all_reduce(tensor[::2], group=group)
    dist.all_reduce(tensor[::2], group=group)
    assert tensor[::2].unique().tolist() == [world.size]


BEFORE_ALL = ("CtxPushCurrent", "StreamCreate", "EventCreate", "MemHostAlloc", "EventRecord")
ELSEWHERE = list(itertools.product(("two nodes", A_NODE_EACH, "many nodes", "MPI"), NAMES, COUNTS, BEFORE_ALL, (0,)))
BETWEEN = list(
    itertools.product(
        ("between devices",),
        ("all_reduce", "broadcast", "reduce_scatter_tensor"),
        (12 * LONGER,),
        (*BETWEEN_DEVICES, "MemcpyDtoDAsync", *CALLS[4:9], "CtxPushCurrent"),
        range(3),
    )
)


PATHS, SUMS = {"between devices": IPC, "in slots": STAGED}, ("all_reduce", "reduce_scatter_tensor")
IN_SLOTS = list(itertools.product(("in slots",), SUMS, (12 * LONGER,), (*CALLS[4:], "CtxPushCurrent"), range(6)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("placement", "name", "count", "call", "after"),
    [
        *share("faults of the driver", WALK),
        *share("faults of the driver elsewhere", ELSEWHERE),
        *share("faults between devices", BETWEEN),
        *share("faults of sums on devices", IN_SLOTS),
    ],
)
def test_walk_of_failures(placement, name, count, call, after, driver, new_group, placed, world, monkeypatch) -> None:
    """The n-th call of each of the driver's functions fails on rank 1: all are told so at once, or have the result.

    Where rank 1 had not come to send anything, the group goes on. Behind an illegal address all calls fail.
    """
    if placement in PATHS:
        inside.sum_on_devices(monkeypatch)
        group = new_pair(new_group, world, path=PATHS[placement])
        try_reading(driver, group)
        group = group.process_group
    else:
        group = placed(placement).process_group
    begun = time.monotonic()
    source, result = (on_device(driver, torch.full((count,), world.rank + 1.0)) for _ in range(2))
    part = on_device(driver, torch.zeros(count // world.size))
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(result, group=group),
        "broadcast": lambda: dist.broadcast(result, 1 if count < 12 * LONGER else 0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(result, source, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, source, group=group),
    }
    driver.drain()
    dist.barrier()
    if placement not in PATHS:
        runtime.shim().lib.mpp_cuda_release()
    error_code = (OUT_OF_MEMORY, ILLEGAL_ADDRESS)[after % 2]
    if world.rank == 1:
        driver.lib.fake_fail(call.encode(), after, error_code)
    goes_on = torch.ones(1)
    try:
        calls[name]()
    except RuntimeError as error:
        assert re.search(f"{WORDS[error_code]} .* on rank 1", str(error)), str(error)
        assert time.monotonic() - begun < patient(10)
        goes_on[0] = isinstance(error, torch.AcceleratorError) or "can be used again" in str(error)
    else:
        ranks = [r + 1 for r in world.ranks]
        expected = {"broadcast": [2 if count < 12 * LONGER else 1], "all_to_all_single": ranks}
        found = part if name == "reduce_scatter_tensor" else result
        assert found.unique().tolist() == expected.get(name, [sum(ranks)])
    driver.recover()
    words = "on rank 1" if goes_on.item() else "make a new group"  # it has its result, or has been told
    dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    if goes_on.item():
        assert_usable(group)
    else:
        with pytest.raises(dist.DistBackendError, match=words):
            dist.all_reduce(torch.ones(5), group=group)
