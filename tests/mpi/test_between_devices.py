"""CUDA tensors that the ranks of a node read from each other's devices, over the stand-in for the driver."""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta
from typing import Any

import inside
import pytest
import torch
import torch.distributed as dist
from expected import makes_sense
from fake_cuda import DeviceCase, Driver, on_device
from groups import Group
from operation_table import TABLE
from patience import patient, wait_until
from started import Failures

from torchmpi_plugin.communicator import cuda_path
from torchmpi_plugin.group import device_reductions
from torchmpi_plugin.mpi import runtime

MOVES = ("broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all", "all_to_all_single")
COUNT = 70_001
LENGTHS = {torch.float32: 4 * COUNT, torch.bfloat16: 40 * COUNT, torch.int8: 40 * COUNT, torch.bool: 4 * COUNT}
OPENED = 4  # of fake_live
IPC = cuda_path.Path(False, "asked for", ipc=True)
STAGED = cuda_path.Path(False, "usual")
BOTH = pytest.mark.parametrize("path", (IPC, STAGED), ids=("read there", "in slots"))
REFUSED = {
    "on no rank": None,
    "a handle on one rank": (0, b"IpcGetMemHandle"),
    "opening it on one": (1, b"IpcOpenMemHandle"),
    "nothing, but one reads what is not there": (1, b"PeerRead"),
}


@pytest.fixture(autouse=True)
def on_few_ranks(world) -> None:
    if world.size not in (2, 3) or os.environ.get("MPIPLUS_COLLECTIVES") == "mpi-only":
        pytest.skip("on 2 and 3 ranks that share slots")


def new_pair(new_group: Any, world: Any, seconds: float = 60, path: cuda_path.Path = IPC) -> Group:
    with cuda_path.taking(path):
        made = new_group(list(world.ranks), timeout=timedelta(seconds=patient(seconds)))
    inside.let_ranks_read_devices(made)
    return Group("between devices", made, world.ranks, world.rank)


def try_reading(driver: Driver, group: Group) -> None:
    """Each finds out that it can read the others' devices, or cannot."""
    mine, result = on_device(driver, torch.ones(1)), on_device(driver, torch.empty(group.size))
    dist.all_gather_into_tensor(result, mine, group=group.process_group)


@pytest.mark.parametrize("refused", REFUSED)
def test_moves(refused: str, driver: Driver, new_group, world) -> None:
    """Right on every way, and without the bus where nobody refuses."""
    if fault := REFUSED[refused]:  # not of what a process finds out once: that would hold for the tests after this one
        try_reading(driver, new_pair(new_group, world))
    failures, group = Failures(), new_pair(new_group, world)
    before = driver.lib.fake_live(OPENED)
    if fault and world.rank == fault[0]:
        driver.lib.fake_fail(fault[1], 0, 1)
    with driver.on_stream(kernel_us=100):
        try_reading(driver, group)
        for name, count in itertools.product(MOVES, (1, 5, COUNT)):
            driver.calls()
            case = DeviceCase(group, torch.float32, (count,), mode=TABLE[name].modes[0])
            failures.run(TABLE[name], case)
            copies = driver.calls()
            to_host = copies.get("MemcpyDtoHAsync", 0)
            if refused == "on no rank":
                assert "MemcpyHtoDAsync" not in copies and to_host <= group.size, (name, copies)
    driver.recover()
    failures.report()
    if refused == "on no rank":
        assert driver.lib.fake_live(OPENED) > before
    group.process_group.shutdown()
    assert before or not driver.lib.fake_live(OPENED)  # after an error of the driver's it stays open


@pytest.mark.parametrize("name", ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter"))
@pytest.mark.parametrize("op_name", TABLE["all_reduce"].op_names)
@BOTH
def test_sums(path, op_name: str, name: str, failures: Failures, driver: Driver, new_group, world, monkeypatch) -> None:
    """Reduced on the devices, of all dtypes that are, and in all modes; what is read there never comes to the host."""
    combine, combined = device_reductions.combine, []
    monkeypatch.setattr(device_reductions, "combine", lambda *given: (combined.append(1), combine(*given)))
    inside.sum_on_devices(monkeypatch)
    group, operation = new_pair(new_group, world, path=path), TABLE[name]
    with driver.on_stream(kernel_us=100):
        try_reading(driver, group)
        for mode, (dtype, count) in itertools.product(operation.modes, LENGTHS.items()):
            case = DeviceCase(group, dtype, (count,), mode=mode, op_name=op_name)
            if makes_sense(dtype, op_name):
                driver.calls()
                combined.clear()
                failures.run(operation, case)
                copies = driver.calls()
                is_there, gets_no_result = op_name != "PREMUL_SUM", name == "reduce" and case.rank != case.root
                assert bool(combined) == is_there or not copies, (str(case), copies)
                if path is IPC:
                    is_right = ("MemcpyHtoDAsync" not in copies) == (is_there or gets_no_result)
                    assert is_right or not copies, (str(case), copies)


def long_tensor(driver: Driver, value: float, rows: int = 4) -> torch.Tensor:
    return on_device(driver, torch.full((rows * COUNT,), float(value)))


@BOTH
def test_sums_in_flight(path: cuda_path.Path, driver: Driver, new_group, world, monkeypatch) -> None:
    """Among other calls, in two groups, in another order on each rank, the last first; while a graph is captured."""
    inside.sum_on_devices(monkeypatch)
    pair = [new_pair(new_group, world, path=path) for _ in range(2)]
    for group in pair:
        try_reading(driver, group)
    begun = []
    with driver.on_stream(kernel_us=200), driver.capturing():
        for group in pair if world.rank % 2 else pair[::-1]:
            process_group = group.process_group
            for number in range(3):
                summed, sent = long_tensor(driver, number + world.rank), long_tensor(driver, world.rank)
                begun.append((dist.all_reduce(summed, group=process_group, async_op=True), summed,
                              sum(number + rank for rank in world.ranks)))  # fmt: skip
                begun.append((dist.broadcast(sent, 1, group=process_group, async_op=True), sent, 1))
                short = on_device(driver, torch.ones(5))
                begun.append((dist.all_reduce(short, group=process_group, async_op=True), short, world.size))
        for work, tensor, value in reversed(begun):
            work.wait()
            assert tensor.unique().tolist() == [value]


@BOTH
def test_what_cannot_be(path: cuda_path.Path, driver: Driver, new_group, world, monkeypatch) -> None:
    """On the host on one rank, another operation, or no memory for it: right, or told on every rank, and it goes on."""
    inside.sum_on_devices(monkeypatch)
    group = new_pair(new_group, world, path=path)
    for number in range(2):
        tensor = torch.ones(4 * COUNT) if world.rank == number else long_tensor(driver, 1)
        dist.all_reduce(tensor, group=group.process_group)
        assert tensor.unique().tolist() == [world.size]
        result = torch.zeros(COUNT) if world.rank == number else on_device(driver, torch.zeros(COUNT))
        blocks = torch.ones(world.size * COUNT)
        blocks = blocks if world.rank == number else on_device(driver, blocks)
        driver.drain()
        dist.reduce_scatter_tensor(result, blocks, group=group.process_group)
        assert result.unique().tolist() == [world.size]
        tensor = torch.zeros(COUNT) if world.rank == number else long_tensor(driver, world.rank, 1)
        dist.broadcast(tensor, 0, group=group.process_group)
        assert tensor.unique().tolist() == [0]
        op = dist.ReduceOp.MAX if world.rank == number else dist.ReduceOp.SUM
        with pytest.raises(dist.DistBackendError, match="disagree"):
            dist.all_reduce(long_tensor(driver, 1), op, group=group.process_group)
    dist.all_reduce(tensor := long_tensor(driver, 1), group=group.process_group)  # by now all have slots on the bus
    assert tensor.unique().tolist() == [world.size]
    with monkeypatch.context() as patch:
        if world.rank == 1:
            patch.setattr(device_reductions, "spaces_for", without_memory)
        tensor = long_tensor(driver, 1)
        dist.all_reduce(tensor, group=group.process_group)
        assert tensor.unique().tolist() == [world.size]
    tensor = long_tensor(driver, 1)
    driver.calls()
    dist.all_reduce(tensor, group=group.process_group)
    assert tensor.unique().tolist() == [world.size] and (path is STAGED or "MemcpyHtoDAsync" not in driver.calls())


def without_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("none left")


@BOTH
def test_a_second_half_that_fails(path: cuda_path.Path, driver: Driver, new_group, world, monkeypatch) -> None:
    """All are told; what has been begun behind it is not left under way."""
    inside.sum_on_devices(monkeypatch)
    group, lib = new_pair(new_group, world, path=path), runtime.shim().lib
    try_reading(driver, group)
    dist.barrier()
    active, is_behind = lib.mpp_active_count(), threading.Event()

    def fail(*_: object) -> None:
        is_behind.wait(patient(5))
        raise torch.OutOfMemoryError("none left")

    if world.rank == 1:
        monkeypatch.setattr(device_reductions, "combine", fail)
    else:
        dist.barrier()  # rank 1 begins first: a call that finds the others there may fail by itself
    works = [dist.all_reduce(long_tensor(driver, 1), group=group.process_group, async_op=True) for _ in range(2)]
    if world.rank == 1:
        dist.barrier()
    dist.barrier()  # on a busy machine another rank begins its second one so much later
    is_behind.set()
    for work, words in zip(works, ("none left" if world.rank == 1 else "OUT_OF_MEMORY.* on rank 1", ""), strict=True):
        with pytest.raises(dist.DistBackendError, match=words):
            work.wait()
    group.process_group.shutdown()
    wait_until(lambda: lib.mpp_active_count() <= active, patient(5))
    dist.barrier()


def test_unless_asked_for(driver: Driver, new_group, world) -> None:
    """No address is shown to anybody."""
    made = new_group(list(world.ranks))
    inside.let_ranks_read_devices(made)
    driver.calls()
    try_reading(driver, Group("usual", made, world.ranks, world.rank))
    assert not any("Ipc" in name for name in driver.calls())


def test_long_tensors_of_a_usual_group(driver: Driver, new_group, world) -> None:
    """From the second call on; what is short is copied by way of the host."""
    with cuda_path.taking(IPC):
        process_group = new_group(list(world.ranks))
    for count, number in itertools.product((1 << 16, (1 << 16) + 1), range(3)):
        driver.calls()
        tensor = on_device(driver, torch.full((count,), float(world.rank)))
        dist.broadcast(tensor, 1, group=process_group)
        assert tensor.unique().tolist() == [1]
        calls, is_read = driver.calls(), count > 1 << 16 and number > 0
        assert world.rank == 1 or ("MemcpyHtoDAsync" in calls) != is_read, (count, number)
        assert number == 0 or ("MemcpyDtoDAsync" in calls) == (is_read and world.rank != 1), (count, number)


@pytest.mark.parametrize("again", [True, False])
def test_memory_that_is_freed(again: bool, driver: Driver, new_group, world) -> None:
    """It is closed with the next call, whether other memory comes to lie there, which is not taken for it, or none."""
    group = new_pair(new_group, world)
    before = driver.lib.fake_live(OPENED)
    tensors = [] if again else [long_tensor(driver, number, 1) for number in range(12)]
    for number in range(12):
        tensor = long_tensor(driver, number, 1) if again else tensors[number]
        driver.drain()
        dist.broadcast(tensor, 1, group=group.process_group)
        assert tensor.unique().tolist() == [number]
        dist.barrier(group=group.process_group)
        driver.free(tensor)
        assert driver.lib.fake_live(OPENED) - before <= 2


def test_memory_that_is_too_much_to_have_open(driver: Driver, new_group, world) -> None:
    """What has been read is closed for what is to be."""
    group = new_pair(new_group, world)
    try_reading(driver, group)
    driver.lib.fake_open_at_most(driver.lib.fake_live(OPENED) + 1)
    for number in range(4):
        tensor = on_device(driver, torch.full((COUNT,), float(number + world.rank)))
        driver.calls()
        dist.broadcast(tensor, 1, group=group.process_group)
        assert tensor.unique().tolist() == [number + 1] and "MemcpyHtoDAsync" not in driver.calls()
    driver.lib.fake_open_at_most(0)


def test_memory_that_another_group_has_read(driver: Driver, new_group, world) -> None:
    """What comes to lie where it was is read all the same, by each of the groups."""
    pair = [new_pair(new_group, world) for _ in range(2)]
    for group in pair:
        try_reading(driver, group)
    for number in range(8):
        process_group = pair[number % 3 // 2].process_group
        tensor = on_device(driver, torch.full((COUNT,), float(number + world.rank)))
        driver.drain()
        driver.calls()
        dist.broadcast(tensor, 1, group=process_group)
        assert tensor.unique().tolist() == [number + 1] and "MemcpyHtoDAsync" not in driver.calls()
        dist.barrier()
        del tensor
        driver.free_all()


def test_memory_that_is_freed_while_other_memory_is_read(driver: Driver, new_group, world) -> None:
    """That of the running copy stays open: the stand-in would tell."""
    pair = [new_pair(new_group, world).process_group for _ in range(2)]
    freed, kept, short = (on_device(driver, torch.full((COUNT,), float(world.rank))) for _ in range(3))
    driver.drain()
    for tensor in (freed, kept, short):
        for process_group in pair:
            dist.broadcast(tensor, 0, group=process_group)
    with driver.on_stream(kernel_us=500_000 if world.rank else 0):
        driver.write_later(kept.data_ptr(), torch.zeros(4, dtype=torch.uint8))
        reading = dist.broadcast(kept, 0, group=pair[0], async_op=True)
        busy, driver.stream = driver.stream, 0
        driver.free(freed)
        for _ in range(4):  # one of the exports finds that it is freed
            dist.broadcast(short, 0, group=pair[1])
        driver.stream = busy
        assert world.rank == 0 or not reading.is_completed()
        reading.wait()
    assert kept.unique().tolist() == [0]


def test_who_is_done_first_may_leave(driver: Driver, new_group, world, channel) -> None:
    """Rank 0 learns that all have read when the others have given the group up."""
    group, lib = new_pair(new_group, world, 20), runtime.shim().lib
    try_reading(driver, group)
    dist.barrier()
    with driver.on_stream(kernel_us=0 if world.rank == 0 else 200_000):
        tensor = on_device(driver, torch.full((COUNT,), float(world.rank)))
        work = dist.broadcast(tensor, 0, group=group.process_group, async_op=True)
        if world.rank == 0:
            driver.drain()
            time.sleep(0.1)  # it shows its tensor
            lib.mpp_lock()
        else:
            work.wait()
            group.process_group.abort()
    channel.Barrier()
    if world.rank == 0:
        lib.mpp_unlock()
        work.wait()
    assert tensor.unique().tolist() == [0]


def test_who_gives_up_may_change_its_tensor(driver: Driver, new_group, world) -> None:
    """The root's deadline comes while another rank still reads from it: that rank's call must not be a success.

    And what the ranks had open is closed with the group.
    """
    before = driver.lib.fake_live(OPENED)
    group = new_pair(new_group, world, 30)
    try_reading(driver, group)
    inside.set_timeout(group.process_group, timedelta(seconds=0.5 if world.rank == 0 else patient(3)))
    dist.barrier()
    with driver.on_stream(kernel_us=0 if world.rank == 0 else 1_500_000):
        tensor = on_device(driver, torch.full((COUNT,), float(world.rank)))
        try:
            dist.broadcast(tensor, 0, group=group.process_group)
        except dist.DistBackendError:
            tensor.fill_(-1)
        else:  # on a machine so busy that the root found out late
            assert tensor.unique().tolist() == [0]
    dist.barrier()
    group.process_group.shutdown()
    assert before or not driver.lib.fake_live(OPENED)
