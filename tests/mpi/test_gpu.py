"""CUDA tensors on a GPU, which all ranks may share. Elsewhere test_cuda.py does without one.

mpirun -n 2 python -m pytest --with-mpi tests/mpi -m gpu
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import inside
import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, Case
from expected import REDUCE_OPS, difference, makes_sense
from groups import Group
from operation_table import MOVEMENT, REDUCTION, TABLE, of_kind
from started import Failures, Operation, Started, resolve
from test_training import needs_gpu, own_gpu
from torch import nn
from torch.distributed import _functional_collectives as functional

from torchmpi_plugin.communicator import cuda_path
from torchmpi_plugin.group import device_reductions, starting
from torchmpi_plugin.mpi import runtime

pytestmark = needs_gpu

LONG_KERNEL = 200_000_000  # clock cycles, about 0.1 s
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex64)
SHAPES = ((), (0,), (5,), (3, 4), (70001,), (3_000_001,))


@pytest.fixture(autouse=True)
def device(world) -> torch.device:
    return own_gpu(world)


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides, and the same bytes between its elements."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).to(device)
    there = torch.empty(0, dtype=tensor.dtype, device=device)
    return there.set_(storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class GpuCase(Case):
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return moved(super().place(tensor), "cuda")

    def empty(self, shape=None) -> torch.Tensor:
        return moved(super().empty(shape), "cuda")


def on_host(started: Started) -> Started:
    """What has been begun on the GPU, with results that are fetched when it is complete."""

    def changed_inputs():
        for tensor, original in started.untouched:
            if wrong := difference(tensor.cpu(), original):
                yield f"an input was changed: it {wrong}"
        if started.check:
            yield from started.check()

    outputs = [functools.partial(lambda lazy: moved(resolve(lazy), "cpu"), output) for output in started.outputs]
    return replace(started, outputs=outputs, untouched=(), check=changed_inputs)


def on_gpu(operation: Operation) -> Operation:
    return replace(operation, start=lambda case: on_host(operation.start(case)))


@pytest.mark.parametrize("operation", [each for each in of_kind(MOVEMENT, REDUCTION) if not each.shapes], ids=str)
def test_every_operation(operation: Operation, all_groups, failures: Failures) -> None:
    modes = [mode for mode in operation.modes if mode != "future"]  # its values would have to be fetched as well
    families = [all_groups[family] for family in ("world", "reversed")]
    cases = [
        GpuCase(group, dtype, shape, mode=mode)
        for group, dtype, shape, mode in itertools.product(families, DTYPES, SHAPES, modes)
    ]
    cases += [GpuCase(families[0], torch.float32, (3, 4), layout, modes[0]) for layout in LAYOUTS[1:]]
    for case in cases:
        if operation.takes(case):
            failures.run(on_gpu(operation), case)
    failures.cases += 1


@pytest.mark.parametrize("is_read_there", [True, False])
def test_between_devices(is_read_there: bool, world, new_group, failures: Failures, monkeypatch) -> None:
    """Ranks on one device, or on devices that reach each other, or their slots; what is freed has other tensors."""
    if world.size == 1 or world.process_group.communicator.node_count > 1 or "MPIPLUS_COLLECTIVES" in os.environ:
        pytest.skip("between ranks of one node that share slots")
    inside.sum_on_devices(monkeypatch)
    with cuda_path.taking(cuda_path.Path(False, "asked for", ipc=is_read_there)):
        made = new_group(list(world.ranks))
    inside.let_ranks_read_devices(made)
    group, lib = Group("between devices", made, world.ranks, world.rank), runtime.shim().lib
    names = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_reduce", "reduce", "reduce_scatter")
    for number, name, count in itertools.product(range(3), names, (5, 70_001, 3_000_001)):
        mode = TABLE[name].modes[0]
        failures.run(on_gpu(TABLE[name]), GpuCase(group, torch.float32, (count + number,), mode=mode))
        if count > 1 << 20:
            torch.cuda.empty_cache()
    reach = lib.MPP_BETWEEN_DEVICES if is_read_there else lib.MPP_ON_BUS
    why_not = f"the driver lets no rank read another one's device: {os.environ.get('PYTORCH_CUDA_ALLOC_CONF')}"
    assert lib.mpp_group_reach(made._handle) == reach, why_not


def test_sparse_all_reduce(world) -> None:
    tensor = (torch.eye(4) * (world.rank + 1)).to_sparse_coo().cuda()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense().cpu(), torch.eye(4) * sum(range(1, world.size + 1)))


@pytest.mark.parametrize("on_side_stream", [False, True])
@pytest.mark.parametrize("count", [5, 5_000_000])
def test_result_of_a_long_kernel(on_side_stream: bool, count: int, world) -> None:
    """Sync and async, in place and to another tensor; the result is used at once, without a synchronisation."""
    total = sum(range(1, world.size + 1))
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for use in (_sync, _async, _by_future):
            torch.cuda._sleep(LONG_KERNEL)
            tensor = torch.full((count,), world.rank + 1.0, device="cuda")
            assert (use(tensor) * 2).unique().tolist() == [2 * total]


def _sync(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _async(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, async_op=True).wait()
    return tensor


def _by_future(tensor: torch.Tensor) -> torch.Tensor:
    """A callback that computes on the GPU, as communication hooks of DDP do."""
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].mul(3)).wait() / 3


def test_a_tensor_that_the_user_drops(world) -> None:
    """Its memory is not given to the next tensor before the operation is over."""
    for _ in range(20):
        torch.cuda._sleep(LONG_KERNEL // 20)
        tensor = torch.full((1 << 20,), 1.0, device="cuda")
        work = dist.all_reduce(tensor, async_op=True)
        del tensor
        others = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
        assert work.result()[0].unique().tolist() == [world.size]
        assert all(other.unique().tolist() == [-1] for other in others)


@pytest.mark.parametrize("op_name", REDUCE_OPS)
def test_kernels_of_reductions(op_name: str, world) -> None:
    """Those that reduce on the device give what they give on the host, where they are compared with a reference."""
    kinds = (*device_reductions._FLOATS, *device_reductions._INTEGERS, torch.bool, torch.complex64)
    for dtype in (kind for kind in kinds if makes_sense(kind, op_name)):
        how = starting.reduction(world.process_group, dtype, Case(world, dtype, op_name=op_name).op, op_name)
        sources = [(torch.rand(1001) * 100).to(dtype) for _ in range(3)]
        wanted, found = torch.empty_like(sources[0]), torch.empty_like(sources[0], device="cuda")
        if not device_reductions.suits(found, 1, how, 0):
            continue
        device_reductions.combine(sources, wanted, how)
        device_reductions.combine([source.cuda() for source in sources], found, how)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=0)


@pytest.mark.mpi(min_size=2)
def test_calls_that_disagree(world) -> None:
    """Told on every rank, on whatever path, before anything is written; then the group works."""
    kinds = (torch.int32, torch.float32)
    for mine in (torch.ones(1 << 20, dtype=kinds[world.rank % 2]), torch.ones((1 << 20) + world.rank)):
        tensor = mine.cuda()
        with pytest.raises(dist.DistBackendError, match=r"the ranks disagree: rank .* calls all_reduce"):
            dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [1]
        dist.all_reduce(again := torch.ones(5, device="cuda"))
        assert again.tolist() == [world.size] * 5


def test_no_memory_on_one_rank(world) -> None:
    """What a long reduction needs on the device, where it is done there: all ranks fail, or none; then all works."""
    failed, tensor = False, torch.full((1 << 25,), world.rank + 1.0, device="cuda")
    torch.cuda.empty_cache()
    if world.rank == 0:
        total = torch.cuda.get_device_properties(tensor.device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        dist.all_reduce(tensor)
    except (torch.OutOfMemoryError, dist.DistBackendError):
        failed = True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    dist.all_gather_object(everywhere := [None] * world.size, failed)
    assert everywhere == [failed] * world.size
    wanted = [world.rank + 1.0] if failed else [sum(range(1, world.size + 1))]
    assert tensor.unique().tolist() == wanted


def test_sync_batch_norm(world, device: torch.device) -> None:
    """Of all ranks' samples, which torch has for devices only."""
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, eps=0, affine=False)).to(device)
    every = torch.arange(2.0 * world.size, device=device).repeat(3, 1).T
    wanted = (every - every.mean(0)) / every.std(0, correction=0)
    torch.testing.assert_close(layer(every[2 * world.rank :][:2]), wanted[2 * world.rank :][:2])


def test_compiled(world, device: torch.device) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert program(torch.ones(5, device=device)).tolist() == [2.0 * world.size + 1] * 5


def test_four_threads(world, device: torch.device, new_group) -> None:
    """Each with a group and a stream of its own."""
    made, total = [new_group(list(world.ranks)) for _ in range(4)], sum(range(1, world.size + 1))

    def work(group: dist.ProcessGroup) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for count in (1, 70_001, 1_000_003) * 5:
                tensor = torch.full((count,), world.rank + 1.0, device=device)
                dist.all_reduce(tensor, group=group)
                assert tensor.unique().tolist() == [total]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, made))


def test_more_bytes_than_an_int_counts(world, device: torch.device) -> None:
    tensor = torch.full((700_000_001,), world.rank + 1.0, device=device)
    dist.all_reduce(tensor)
    assert [tensor.min().item(), tensor.max().item()] == [sum(range(1, world.size + 1))] * 2


def test_objects_with_tensors(world, device: torch.device) -> None:
    found: list = [None] * world.size
    dist.all_gather_object(found, {"rank": world.rank, "tensor": torch.full((3,), float(world.rank), device=device)})
    assert [(each["rank"], each["tensor"].tolist()) for each in found] == [(r, [r] * 3) for r in range(world.size)]


def test_capture_is_refused(world) -> None:
    tensor = torch.ones(5, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)


def test_while_a_graph_is_captured(world) -> None:
    """Operations on another stream go on, and so does the capture."""
    graph, source, side = torch.cuda.CUDAGraph(), torch.ones(5, device="cuda"), torch.cuda.Stream()
    tensors = [torch.full((count,), world.rank + 1.0, device="cuda") for count in (5, 200_000)]
    with torch.cuda.graph(graph):
        doubled = source * 2
        with torch.cuda.stream(side):
            for tensor in tensors:
                dist.all_reduce(tensor)
    source.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6] * 5
    assert all(tensor.unique().tolist() == [sum(range(1, world.size + 1))] for tensor in tensors)


@pytest.mark.parametrize("call", [dist.all_reduce, lambda t: dist.all_gather([t.clone()] * dist.get_world_size(), t)])
def test_tensors_on_host_and_device_together(call: Callable, world) -> None:
    """One operation is on one device."""
    tensor = torch.ones(3, device="cuda")
    call(tensor)
    with pytest.raises(ValueError, match=r"one device, not .*cpu"):
        dist.all_gather([torch.ones(3) for _ in range(world.size)], tensor)
