"""CUDA tensors over a stand-in for the driver: every operation on every path, in stream order."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import fake_cuda
import inside
import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS
from fake_cuda import DeviceCase, Driver, on_device
from groups import Group
from operation_table import MOVEMENT, REDUCTION, TABLE, of_kind
from patience import wait_until
from started import Failures, Operation, in_flight
from test_between_devices import MOVES

import torchmpi_plugin
from torchmpi_plugin.cli.info.worker import staging_on_node
from torchmpi_plugin.group import starting
from torchmpi_plugin.mpi import runtime

PIECE = fake_cuda.STAGE_BYTES  # of an operation with one buffer
CALLS = 100  # so many that, however busy the machine, one is moved by its own thread alone, and within a slice
DTYPES = (torch.bfloat16, torch.uint8)
SHAPES = ((), (0,), (5,), (70001,))
ON_DEVICE = [operation for operation in of_kind(MOVEMENT, REDUCTION) if operation.name != "sparse_all_reduce"]


@pytest.fixture(autouse=True)
def on_few_ranks(request, world) -> None:
    """The ranks and the device's threads share the cores, and take minutes on more than two."""
    path = request.node.callspec.params.get("pair") if hasattr(request.node, "callspec") else None
    # With three, reductions have another algorithm in shared memory, and more than one block to send elsewhere.
    usual = world.size == 2 or (
        world.size == 3 and path in ("shared memory", "direct") and "reduc" in request.node.name
    )
    if not usual and not os.environ.get("MPIPLUS_TEST_CUDA"):
        pytest.skip("on 2 ranks, and reductions in shared memory on 3; MPIPLUS_TEST_CUDA=1 asks for everything")


@pytest.fixture(scope="session")
def over_mpi(all_groups) -> dict[str, Group]:
    """Groups that use MPI's own collectives, as between nodes."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIPLUS_COLLECTIVES", "mpi-only")
        for family in ("world", "reversed"):
            ranks = list(all_groups[family].ranks)
            group = dist.new_group(ranks, timeout=timedelta(seconds=30))
            made[family] = Group(f"{family} over MPI", group, tuple(sorted(ranks)), dist.get_rank(group))
    return made


@pytest.fixture(params=["shared memory", "MPI", "direct"])
def pair(request, all_groups, over_mpi, monkeypatch) -> Iterator[list[Group]]:
    """Two groups of all ranks; with "direct" MPI is handed the stand-in's memory, which this one can reach."""
    chosen = over_mpi if request.param == "MPI" else all_groups
    found = [chosen["world"], chosen["reversed"]]
    inside.let_mpi_reach_devices([group.process_group for group in found], request.param == "direct")
    inside.stage_no_reductions(monkeypatch)
    yield found
    inside.let_mpi_reach_devices([group.process_group for group in found], False)


@pytest.mark.cases(3)
@pytest.mark.parametrize("operation", ON_DEVICE, ids=str)
def test_every_operation(operation: Operation, pair: list[Group], driver: Driver, failures: Failures) -> None:
    failures.cases += operation.min_size > pair[0].size
    with driver.on_stream(kernel_us=100):
        plain = [DeviceCase(pair[0], shape=shape) for shape in SHAPES]
        others = [DeviceCase(pair[1], dtype, (70001,)) for dtype in DTYPES]
        others += [DeviceCase(pair[1], shape=(3, 4), layout=layout) for layout in LAYOUTS[1:]]
        modes = operation.modes if pair[0].size <= 3 else operation.modes[-1:]  # for the sake of time
        for case, mode in [*itertools.product(plain, modes), *itertools.product(others, modes[:1])]:
            if operation.takes(case):
                failures.run(operation, case.with_(mode=mode))


def test_while_a_graph_is_captured(pair: list[Group], driver: Driver, new_group, world, failures: Failures) -> None:
    """By another thread, of what else is done: neither it nor an operation fails. A new group has all still to make."""
    new = Group("new", new_group(list(world.ranks)), world.ranks, world.rank)
    runtime.shim().lib.mpp_cuda_release()
    with driver.on_stream(kernel_us=100), driver.capturing():
        for group, count in itertools.product((new, pair[0]), (5, 5 * PIECE)):
            for name in ("all_reduce", "broadcast", "isend_irecv"):
                for layout in ("contiguous", "strided"):  # the other is copied behind it
                    failures.run(TABLE[name], DeviceCase(group, torch.float32, (count,), layout, TABLE[name].modes[-1]))
        new.process_group.shutdown()


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"])
def test_every_reduction(name: str, pair: list[Group], driver: Driver, failures: Failures) -> None:
    operation = TABLE[name]
    with driver.on_stream(kernel_us=100):
        for op_name in operation.op_names:
            # Of many narrow floats some lie where MPI's order of additions decides the rounding.
            for dtype in (torch.float64, torch.float16, torch.int8, torch.bool):
                count = 300 if dtype is torch.float16 else 20001
                case = DeviceCase(pair[0], dtype, (count,), op_name=op_name)
                if operation.takes(case):
                    failures.run(operation, case)


@pytest.mark.parametrize("name", ["broadcast", "all_reduce", "reduce", "all_gather_into_tensor", "isend_irecv"])
def test_sizes_around_a_piece(name: str, pair: list[Group], driver: Driver, failures: Failures) -> None:
    """The last piece full, one byte short, one byte long; fewer pieces than slots, as many, and more."""
    operation = TABLE[name]
    with driver.on_stream(kernel_us=0):
        for pieces, odd in itertools.product((1, 2, 4, 5, 9), (-1, 0, 1)):
            case = DeviceCase(pair[0], torch.uint8, (pieces * PIECE + odd,), mode=operation.modes[-1])
            if operation.takes(case):
                failures.run(operation, case)


@pytest.mark.parametrize("pair", ["MPI", "direct"], indirect=True)  # shared memory knows no limit
def test_with_a_low_limit_of_counts(pair: list[Group], driver: Driver, failures: Failures) -> None:
    """Several MPI messages for one tensor, as above 1 GiB."""
    with inside.chunk_limit(256), driver.on_stream(kernel_us=50):
        for operation, dtype in itertools.product(ON_DEVICE, (torch.float32, torch.bfloat16)):
            case = DeviceCase(pair[0], dtype, (1000,), mode=operation.modes[0])
            if operation.takes(case):
                failures.run(operation, case)


def test_result_of_a_long_kernel(pair: list[Group], driver: Driver) -> None:
    """The regression test of stream order: the input is written by a kernel that is far from done at the call."""
    group, count = pair[0], 20_000
    with driver.on_stream(kernel_us=150_000):
        mine = on_device(driver, torch.full((count,), group.rank + 1.0))
        assert mine[0] != group.rank + 1.0, "the kernel should still run"
        dist.all_reduce(mine, group=group.process_group)
        assert mine.unique().tolist() == [sum(range(1, group.size + 1))]
        mine = on_device(driver, torch.full((count,), group.rank + 1.0))
        dist.broadcast(mine, group.ranks[0], group=group.process_group, async_op=True).wait()
        assert mine.unique().tolist() == [1]
        mine = on_device(driver, torch.ones(count))
        outputs = [[mine.new_empty(count) for _ in range(2 * group.size)] for _ in range(2)]
        group.process_group.allgather(outputs, [mine, mine]).wait()
        assert outputs[0][0].unique().tolist() == [1]


def test_result_waits_for_those_who_still_read(pair: list[Group], driver: Driver) -> None:
    """What the user has queued before the call reads the old values, however early the message comes."""
    group = pair[0]
    if group.size < 2:
        return
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    target = on_device(driver, torch.zeros(64))
    driver.drain()
    with driver.on_stream(kernel_us=100_000):
        between = torch.full((64,), 7.0).view(torch.uint8)
        driver.write_later(target.data_ptr(), between)  # stands for a kernel
        work = dist.irecv(target, group.ranks[source], group=group.process_group)
        dist.send(torch.full((64,), float(group.rank)), group.ranks[to], group=group.process_group)
        work.wait()
        driver.drain()
        assert target.unique().tolist() == [source]


def test_everything_in_flight(pair: list[Group], driver: Driver) -> None:
    """Begun before the first is waited for, the last one first; both groups, in another order on every other rank."""
    order = pair if dist.get_rank() % 2 else pair[::-1]
    with driver.on_stream(kernel_us=200):
        cases = [DeviceCase(group, torch.float32, (30_000,), mode="wait") for group in order]
        assert in_flight(ON_DEVICE, *cases) == []


def test_messages_do_not_overtake_one_that_waits(all_groups, driver: Driver) -> None:
    """A CUDA tensor, then a CPU tensor, to the same rank with the same tag; with another tag it need not wait."""
    group = all_groups["world"]
    if group.size < 2 or group.rank > 1:
        return
    if group.rank == 0:
        with driver.on_stream(kernel_us=400_000):
            slow = on_device(driver, torch.full((5,), 1.0))
            works = [dist.isend(slow, 1), dist.isend(torch.full((5,), 2.0), 1), dist.isend(torch.zeros(5), 1, tag=1)]
            works[2].wait()
            assert not works[0].is_completed()
            for work in works:
                work.wait()
    else:
        received = [torch.empty(5) for _ in range(3)]
        dist.recv(received[2], 0, tag=1)
        for tensor in received[:2]:
            dist.recv(tensor, 0)
        assert [tensor[0].item() for tensor in received] == [1, 2, 0]


def test_host_and_device_on_the_two_sides(all_groups, driver: Driver) -> None:
    """What a rank sends from a CUDA tensor another may take into a CPU tensor."""
    group = all_groups["world"]
    numbers = torch.arange(100_000.0)
    if group.size < 2:
        return
    if group.rank == 0:
        dist.send(on_device(driver, numbers), 1)
    if group.rank == 1:
        received = torch.empty(100_000)
        dist.recv(received, 0)
        assert torch.equal(received, numbers)
    if os.environ.get("MPIPLUS_COLLECTIVES") == "mpi-only":
        return  # between nodes collectives are cut up differently
    for reduce, count, result in (
        *((dist.all_reduce, count, group.size) for count in (5, 100_000)),
        *((torchmpi_plugin.scan, count, group.rank + 1) for count in (5, 600_000)),  # in pieces
    ):
        tensor = torch.ones(count) if group.rank else on_device(driver, torch.ones(count))
        reduce(tensor)
        assert tensor.unique().tolist() == [result]


@pytest.mark.parametrize("in_detail", [False, True])
@pytest.mark.parametrize("pair", ["MPI", "direct"], indirect=True)
def test_host_and_device_where_they_cannot_meet(
    pair: list[Group], in_detail: bool, driver: Driver, monkeypatch
) -> None:
    """Every rank is told, with TORCH_DISTRIBUTED_DEBUG=DETAIL in the words of that."""
    group = pair[0]
    monkeypatch.setattr(inside.calls(group.process_group), "compares", in_detail and group.size > 1)
    words = r"rank 0 calls .* float32 on cuda( with root 0)?; ranks? .* float32[. ]"
    tensor = on_device(driver, torch.ones(5)) if group.rank == 0 else torch.ones(5)
    for call in (dist.all_reduce, lambda t, group: dist.broadcast(t, 0, group)) if group.size > 1 else ():
        with pytest.raises(dist.DistBackendError, match=words if in_detail else "the ranks disagree: rank"):
            call(tensor, group=group.process_group)
    received = [torch.zeros(5) for _ in group.ranks] if group.rank == 0 else None
    mine = torch.ones(5) if group.rank == 0 else on_device(driver, torch.ones(5))
    dist.gather(mine, received, group.ranks[0], group=group.process_group)
    assert group.rank or torch.stack(received).unique().tolist() == [1]


def reduce_by_address(group: Group, driver: Driver, device: int, count: int) -> list[float]:
    """all_reduce in memory that only the device can reach; the values that come out."""
    ours = group.process_group
    lib, ffi, size = runtime.shim().lib, runtime.shim().ffi, count * 4
    address, stream = driver.lib.fake_alloc(device, size, 0), driver.lib.fake_stream(device)
    mine = torch.full((count,), group.rank + 1.0)
    driver.lib.fake_kernel(stream, device, 2000, address, mine.data_ptr(), size)
    how = starting.reduction(ours, torch.float32, dist.ReduceOp.SUM, "all_reduce")
    staging = lib.mpp_stage(device, stream, 0, ffi.new("int *"))
    operands = {"of": ours.communicator.handle, "input": address, "output": address, "count": count, "how": how}
    operands |= {"root": -1, "staging": staging, "wait_ns": 30_000_000_000}
    assert not lib.mpp_allreduce(ffi.new("mpp_operands *", operands))
    view = (ctypes.c_float * count).from_address(driver.lib.fake_view(address))
    values = torch.frombuffer(view, dtype=torch.float32).unique().tolist()
    driver.lib.fake_stream_destroy(stream)
    driver.lib.fake_free(address)
    return values


def test_two_devices_from_two_threads(pair: list[Group], driver: Driver) -> None:
    """Each with a group of its own, at the same time; threads that have no context of CUDA's yet."""

    def work(device: int) -> list[list[float]]:
        return [reduce_by_address(pair[device], driver, device, count) for count in (5, 70001, 5, 40001)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(work, range(2)))
    assert found == [[[sum(range(1, pair[0].size + 1))]] * 4] * 2


SUMS = ("all_reduce", "reduce", "reduce_scatter_tensor")
LONG = (9 << 18) + 5  # floats: more chunks of 1 MiB than there are slots


@pytest.mark.parametrize("refused", ["on no rank", "on one rank", "on all ranks"])
def test_slots_that_are_registered(refused: str, driver: Driver, new_group, world) -> None:
    """The device copies to slots and back, without memory of the rank's own; where the driver refuses, with it."""
    failures, process_group = Failures(), new_group(list(world.ranks))
    before = driver.lib.fake_live(3)
    group = Group("registered", process_group, world.ranks, world.rank)
    is_refused = refused == "on all ranks" or (refused == "on one rank" and world.rank == 0)
    if is_refused:
        driver.lib.fake_fail(b"MemHostRegister", 0, 1)
    elif refused == "on no rank":
        runtime.shim().lib.mpp_cuda_release()
        driver.lib.fake_fail(b"MemHostAlloc", 0, 2)  # no pinned memory at all
    assert ("pinned memory" in staging_on_node(runtime.mpi())) == is_refused  # what `mpiplus info` says
    with driver.on_stream(kernel_us=100):
        for name, count in itertools.product((*MOVES, *SUMS), (5, 70001, LONG)):
            if count == 5 and name in SUMS and refused == "on no rank":
                continue  # staged
            case = DeviceCase(group, torch.float32, (count,), mode=TABLE[name].modes[0])
            if TABLE[name].takes(case):
                failures.run(TABLE[name], case)
    driver.lib.fake_fail(None, 0, 0)
    failures.report()
    tensor = torch.ones(LONG) if world.rank else on_device(driver, torch.ones(LONG))
    dist.all_reduce(tensor, group=process_group)
    assert tensor.unique().tolist() == [world.size]
    for root in range(world.size):
        mine = torch.arange(70001.0) + world.rank
        tensor = mine if world.rank else on_device(driver, mine)
        dist.broadcast(tensor, root, group=process_group)
        assert tensor.equal(torch.arange(70001.0) + root)
    if world.size > 1:
        assert driver.lib.fake_live(3) - before == (not is_refused)
    process_group.shutdown()
    assert driver.lib.fake_live(3) == before
    assert driver.violations() == []


def test_no_room_for_slots_of_the_device(driver: Driver, new_group, world, monkeypatch) -> None:
    """In a small /dev/shm they are not made: all is as between nodes, and what is left there stays for others."""
    room, before = os.statvfs_result((4096, 4096, 1000, 1, 1, 0, 0, 0, 0, 255)), driver.lib.fake_live(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda _: room)
        process_group = new_group(list(world.ranks))
    for count in (5, LONG):
        tensor = on_device(driver, torch.ones(count))
        dist.all_reduce(tensor, group=process_group)
        assert tensor.unique().tolist() == [world.size]
    assert driver.lib.fake_live(3) == before
    assert world.size < 2 or process_group.communicator.footprint.segment < 9 << 20


def test_everything_is_given_back(driver: Driver, world) -> None:
    lib = runtime.shim().lib
    lib.mpp_cuda_release()
    before = [driver.lib.fake_live(what) for what in range(3)]
    for _ in range(3):
        tensor = on_device(driver, torch.ones(9 * PIECE))
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()

    def is_given_back() -> bool:
        lib.mpp_cuda_release()  # less is left, where an earlier test's Work has died meanwhile
        return all(driver.lib.fake_live(what) <= before[what] for what in range(3))

    wait_until(is_given_back, 5)  # the last Work dies when the background thread lets go of it


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "send"])
def test_calls_of_the_driver(name: str, driver: Driver, world) -> None:
    """Of 8 bytes: the copies that there must be, and one event of the user's stream: where that copies, its end.

    Besides it is asked until the device is there. The device is entered once, unless the wait takes more than a slice
    or another thread moves it.
    """
    loads, stores = name == "all_reduce" or world.rank == 0, name == "all_reduce" or world.rank > 0
    short = loads and name != "broadcast"  # that copies by the bus
    copies = ["MemcpyDtoHAsync"] * loads + ["MemcpyHtoDAsync"] * stores + ["StreamWaitEvent"] * (not short)
    calls = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda tensor: dist.broadcast(tensor, 0),
        "send": lambda tensor: dist.send(tensor, 1) if world.rank == 0 else dist.recv(tensor, 0),
    }
    tensor = on_device(driver, torch.ones(2))
    driver.drain()
    if world.rank > 1 and name == "send":
        return
    found, entered = Counter(), []
    for number in range(CALLS + 3):
        driver.calls()
        calls[name](tensor)
        entered.append((one := driver.calls())["CtxPushCurrent"])
        if number >= 3:  # what is made once, is
            found.update(one)
    assert min(entered) == 1
    del found["CtxPushCurrent"], found["CtxPopCurrent"]
    assert [found.pop(what, 0) >= CALLS for what in ("EventQuery", "StreamQuery")] == [short, stores or not short]
    made = {what: found.pop(what, 0) for what in ("StreamCreate", "EventCreate", "MemHostAlloc")}
    assert dict(found) == dict.fromkeys(("EventRecord", *copies), CALLS)
    assert max(made.values()) <= CALLS // 20 * 9  # for those whose end another thread has seen: a few
