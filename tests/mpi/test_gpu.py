"""CUDA tensors on a GPU, which all ranks may share. Elsewhere test_cuda.py does without one.

mpirun -n 2 python -m pytest --with-mpi tests/mpi -m gpu
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace

import inside
import pytest
import torch
import torch.distributed as dist
from cases import Case
from expected import REDUCE_OPS, difference, makes_sense
from groups import Group
from operation_table import MOVEMENT, OPERATIONS, REDUCTION, TABLE
from started import Failures, Operation, Started, resolve
from test_training import alone, batch, make_model, my_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmpi_plugin.communicator import cuda_path
from torchmpi_plugin.group import device_reductions, starting
from torchmpi_plugin.mpi import runtime

if torch.version.cuda is None:
    WHY_NOT = f"needs a GPU: torch {torch.__version__} is built without CUDA"
else:
    WHY_NOT = "" if torch.cuda.is_available() else "needs a GPU: torch.cuda.is_available() is False"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

LONG_KERNEL = 200_000_000  # clock cycles, about 0.1 s
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex64)
SHAPES = ((), (0,), (5,), (3, 4), (70001,), (3_000_001,))


@pytest.fixture(autouse=True)
def device(world) -> torch.device:
    place = world.process_group.communicator.place
    torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


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


def rows() -> list:
    wanted = [operation for operation in OPERATIONS if operation.kind in (MOVEMENT, REDUCTION)]
    return [pytest.param(operation, id=operation.name) for operation in wanted if not operation.shapes]


@pytest.mark.parametrize("operation", rows())
def test_every_operation(operation: Operation, all_groups) -> None:
    failures = Failures()
    modes = [mode for mode in operation.modes if mode != "future"]  # its values would have to be fetched as well
    for family, dtype, shape, mode in itertools.product(("world", "reversed"), DTYPES, SHAPES, modes):
        group = all_groups[family]
        allowed = operation.kind != REDUCTION or makes_sense(dtype, "SUM")
        if group.size >= operation.min_size and allowed:
            failures.run(on_gpu(operation), GpuCase(group, dtype, shape, mode=mode))
    for layout in ("strided", "transposed", "offset", "channels_last"):
        if all_groups["world"].size >= operation.min_size:
            case = GpuCase(all_groups["world"], torch.float32, (3, 4), layout, modes[0])
            failures.run(on_gpu(operation), case)
    failures.cases += 1
    failures.report()


def test_between_devices(world, new_group, monkeypatch) -> None:
    """Ranks on one device, or on devices that reach each other; where memory is freed, other memory comes to lie."""
    if world.size == 1 or world.process_group.communicator.node_count > 1 or "MPIPLUS_COLLECTIVES" in os.environ:
        pytest.skip("between ranks of one node that share slots")
    inside.sum_between_devices(monkeypatch)
    with cuda_path.taking(cuda_path.Path(False, "asked for", ipc=True)):
        made = new_group(list(world.ranks))
    inside.let_ranks_read_devices(made)
    failures, group, lib = Failures(), Group("between devices", made, world.ranks, world.rank), runtime.shim().lib
    names = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_reduce", "reduce", "reduce_scatter")
    for number, name, count in itertools.product(range(3), names, (5, 70_001, 3_000_001)):
        mode = TABLE[name].modes[0]
        failures.run(on_gpu(TABLE[name]), GpuCase(group, torch.float32, (count + number,), mode=mode))
        if count > 1 << 20:
            torch.cuda.empty_cache()
    failures.report()
    why_not = f"the driver lets no rank read another one's device: {os.environ.get('PYTORCH_CUDA_ALLOC_CONF')}"
    assert lib.mpp_group_reads_devices(made._handle), why_not


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


def test_training(world) -> None:
    model = DistributedDataParallel(make_model().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(5):
        inputs, labels = (my_part(part).cuda() for part in batch(step))
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for mine, wanted in zip(model.module.parameters(), alone().parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-3, atol=1e-4)


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
