"""Whole training steps: DistributedDataParallel, FSDP and DTensor give what one process gives."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import groups
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if torch.version.cuda is None:
    WHY_NOT = f"needs a GPU: torch {torch.__version__} is built without CUDA"
else:
    WHY_NOT = "" if torch.cuda.is_available() else "needs a GPU: torch.cuda.is_available() is False"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
BATCH_PER_RANK, FEATURES, CLASSES, STEPS = 6, 8, 4, 5


def own_gpu(world) -> torch.device:
    """Which ranks may share; the current one from now on."""
    place = world.process_group.communicator.place
    torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request, world) -> Iterator[torch.device]:
    """Where all tensors of a test are."""
    chosen = torch.device("cpu") if request.param == "cpu" else own_gpu(world)
    with contextlib.nullcontext() if chosen.type == "cpu" else chosen:
        yield chosen


class Net(nn.Module):
    """A small classifier with a branch that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 16)
        self.extra = nn.Linear(16, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, with_extra: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.embed(x))
        return self.out(torch.tanh(self.extra(hidden)) if with_extra else hidden)


def make_model() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole world's batch of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = BATCH_PER_RANK * dist.get_world_size()
    inputs = torch.randn(rows, FEATURES, generator=generator, device="cpu")
    labels = torch.randint(0, CLASSES, (rows,), generator=generator, device="cpu")
    return inputs.to(torch.get_default_device()), labels.to(torch.get_default_device())


def my_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, part=lambda tensor: tensor, skips_extra: bool = False) -> list[float]:
    """Some steps of SGD; the losses. `part` takes this process's rows of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step)
        with_extra = not (skips_extra and step % 2)
        outputs = model(part(inputs), with_extra)
        loss = nn.functional.cross_entropy(outputs, part(labels))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(skips_extra: bool = False) -> Net:
    """The model after the same steps in this process only, on whole batches."""
    model = make_model()
    train(model, skips_extra=skips_extra)
    return model


def assert_same_parameters(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        value = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(value, its, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def ddp(**options) -> DistributedDataParallel:
    return DistributedDataParallel(make_model(), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_ddp_equals_one_process(options: dict[str, Any]) -> None:
    """Also in many buckets, in join(). Momentum moves what a step does not use: right only if its gradients are 0."""
    model, skips_extra = ddp(**options), "find_unused_parameters" in options
    with model.join(divide_by_initial_world_size=False, enable="bucket_cap_mb" in options):
        train(model, my_part, skips_extra)
    assert_same_parameters(model.module, alone(skips_extra), rtol=1e-4, atol=1e-5)


def test_ddp_with_power_sgd() -> None:
    """Its callbacks start operations and wait for their futures."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = ddp()
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        train(model, my_part)
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    its = mine.clone()
    dist.broadcast(its, 0)
    assert torch.equal(mine, its)


def summed_again(future: torch.futures.Future, times: int, delay: float) -> torch.Tensor:
    tensor = future.value()[0]
    if times == 0:
        return tensor
    time.sleep(delay)
    again = dist.all_reduce(tensor, async_op=True).get_future()
    return again.then(lambda done: summed_again(done, times - 1, delay)).wait()


def test_callbacks_that_wait_for_futures() -> None:
    """However deep: whoever runs them must not be the one who completes what they wait for."""
    delay = 0.02 * dist.get_rank()
    time.sleep(delay)
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    deep = future.then(lambda done: summed_again(done, 4, delay))
    assert deep.wait().tolist() == [dist.get_world_size() ** 5] * 2


@pytest.mark.parametrize("hook", ["ALLREDUCE", "FP16_COMPRESS"])
@pytest.mark.filterwarnings("error:.*torch.jit")
@pytest.mark.timeout(200)
def test_hooks_that_c10d_has_in_cpp(hook: str, device: torch.device, world, channel) -> None:
    """They read the future's value in C++; the parameters become those that gloo gives."""
    if hook == "FP16_COMPRESS" and device.type == "cuda":
        pytest.skip("a list of tensors on devices is no list to C++: docs/cuda.md")

    def trained(group: Any) -> nn.Module:
        model = DistributedDataParallel(make_model(), process_group=group)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
        train(model, my_part)
        return model

    wanted = groups.on_gloo(channel, trained)
    assert_same_parameters(trained(dist.group.WORLD), wanted, rtol=1e-3, atol=1e-3)


def test_a_future_that_cpp_can_read_tells_of_a_failure(world) -> None:
    """It resolves to the same tensor, or to an error with the operation's own words."""
    tensor = torch.ones(3, dtype=torch.float16)
    assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0].tolist() == [world.size] * 3
    group = groups.new_group(None, timedelta(seconds=0.5))
    if world.size > 1:
        if world.rank == 0:
            with pytest.raises(RuntimeError, match=r"all_reduce of .*float16"):
                dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        dist.barrier()
    dist.destroy_process_group(group)


def test_ddp_of_a_sparse_embedding() -> None:
    torch.manual_seed(1)
    table = nn.Embedding(10, 3, sparse=True)
    model = DistributedDataParallel(copy.deepcopy(table))
    words = torch.arange(4 * dist.get_world_size()).reshape(dist.get_world_size(), 4) % 10
    model(words[dist.get_rank()]).pow(2).sum().backward()
    table(words).pow(2).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_sparse
    expected = table.weight.grad.to_dense() / dist.get_world_size()
    torch.testing.assert_close(gradient.to_dense(), expected)


def test_fsdp1_equals_one_process(device: torch.device) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make_model(), device_id=device, use_orig_params=True)
    train(model, my_part)
    with FullyShardedDataParallel.summon_full_params(model):
        assert_same_parameters(model, alone(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_equals_one_process(reshard: bool, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = make_model()
    for layer in (model.embed, model.extra, model.out, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    train(model, my_part)
    assert_same_parameters(model, alone(), rtol=1e-4, atol=1e-5)


def test_dtensor_redistributes(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = torch.arange(77.0).reshape(7, 11)  # no size divides both
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    for placement in (Shard(1), Replicate(), Shard(0), Shard(1)):
        sharded = sharded.redistribute(placements=[placement])
        assert torch.equal(sharded.full_tensor(), whole), f"after {placement}"
    partial = DTensor.from_local(whole.clone(), mesh, [Partial()])
    for placement in (Replicate(), Shard(0), Shard(1)):
        total = partial.redistribute(placements=[placement]).full_tensor()
        assert torch.equal(total, whole * dist.get_world_size()), f"partial to {placement}"
