"""The ways to train that ``mpiplus bench --train`` knows: one table, each row a network made ready for its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ..device import CPU, Device
from .models import CNN, SLEEPER, TRANSFORMER, WORKERS, Task, load

_SEED = 11
_MOMENTUM = 0.9
#: Samples of the pipeline's microbatches, at least, and microbatches for each stage.
_MICROBATCHES = 2
_BOTH = ("float32", "bfloat16")


@dataclass(frozen=True)
class Place:
    """A network with its dtype and group, ready to be trained."""

    task: Task  # which network
    dtype: torch.dtype  # of its parameters and data
    group: dist.ProcessGroup  # the process group; for a step alone, a group that sends nothing
    making_group: dist.ProcessGroup  # one that sends, to make DDP and stages on
    alone: bool = False  # whether the step is one that does all but communicate
    device: Device = CPU  # where the network and its data are

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def network(self) -> nn.Module:
        """Return a new one, the same on every rank."""
        torch.manual_seed(_SEED)
        return self.task.make().to(self.device.place, self.dtype)

    def batch(self, samples: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return data and targets, those of ``rank``."""
        dice = torch.Generator().manual_seed(_SEED + 1 + rank)
        data, targets = self.task.batch(dice, samples, self.dtype)
        return data.to(self.device.place), targets.to(self.device.place)


@dataclass
class Training:
    """A network on one group, with this rank's batch."""

    step: Callable[[], Tensor]  # trains one step and returns the loss before it; 0 on a rank that does not know it
    optimizer: Optimizer  # what changes the parameters
    samples: int  # what all ranks together take in one step
    copies: Sequence[Tensor] = ()  # parameters that must be the same on all ranks
    #: the elements of each bucket of DDP, in the order of their all_reduce; only of one that is alone
    buckets: list[int] = field(default_factory=list)

    def stand_still(self) -> None:
        """From now on steps take as long and change nothing: many on one batch end in numbers no training has."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def parameters(self) -> Tensor:
        """Return a copy of all ``copies`` in host memory, as one vector of float64."""
        return torch.cat(
            [copy.detach().double().flatten().cpu() for copy in self.copies]
            or [torch.empty(0, dtype=torch.double, device="cpu")]
        )


def _loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.float(), targets)


def _backward(model: nn.Module, batch: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    data, targets = batch
    loss = _loss(model(data), targets)
    (loss * scale if scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call,unused-ignore]
    return loss.detach()


def _sgd(place: Place, model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=place.task.learning_rate, momentum=_MOMENTUM)


def _plain_training(place: Place, model: nn.Module, rank: int, batches: int, copies: Sequence[Tensor] = ()) -> Training:
    """``rank``: whose batch it is; ``batches``: how many different ones all ranks have."""
    optimizer, batch = _sgd(place, model), place.batch(place.task.samples, rank)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = _backward(model, batch)
        optimizer.step()
        return loss

    return Training(step, optimizer, len(batch[1]) * batches, copies)


# ---- DistributedDataParallel ----


def _ddp(
    place: Place,
    bucket_mib: int = 1,
    zero: bool = False,
    has_loaders: bool = False,
    at_once: bool = False,
    batches_in_step: int = 1,
) -> Training:
    """DDP, whose buckets' lengths are known in each step that is alone.

    Args:
        at_once: the gradients' all_reduce is within the backward pass: what DDP costs with nothing in the background.
        batches_in_step: gradients of so many are added up, all but the last without an all_reduce.
    """
    model = DistributedDataParallel(place.network(), process_group=place.making_group, bucket_cap_mb=bucket_mib)
    lengths: list[int] = []

    def hook(bucket: Tensor) -> torch.futures.Future[Tensor]:
        if place.alone:
            lengths.append(bucket.numel())
        else:
            dist.all_reduce(bucket, group=place.group)
        completed: torch.futures.Future[Tensor] = torch.futures.Future(devices=[] if bucket.is_cpu else [bucket.device])
        completed.set_result(bucket)
        return completed

    if place.alone or at_once:
        # Not the function itself: DDP takes no annotations that are text, as all are here.
        model.register_comm_hook(None, lambda state, bucket: hook(bucket.buffer()))
    optimizer = _zero_optimizer(place, model) if zero else _sgd(place, model)
    batch = place.batch(place.task.samples * batches_in_step, place.rank)
    batches = load(*batch) if has_loaders else repeat(batch)
    # DDP divides gradients by the number of ranks while it copies them, but not for a hook.
    scale = (1 / place.size if at_once else 1.0) / batches_in_step

    def step() -> Tensor:
        lengths.clear()
        optimizer.zero_grad()
        *parts, last = zip(*(whole.chunk(batches_in_step) for whole in next(batches)), strict=True)
        with model.no_sync():
            losses = [_backward(model, part, scale) for part in parts]
        losses.append(_backward(model, last, scale))
        optimizer.step()
        return torch.stack(losses).mean()

    return Training(step, optimizer, len(batch[1]) * place.size, list(model.parameters()), lengths)


def _zero_optimizer(place: Place, model: nn.Module) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings: dict[str, Any] = {"lr": place.task.learning_rate, "momentum": _MOMENTUM}
    return ZeroRedundancyOptimizer(model.parameters(), SGD, process_group=place.group, **settings)


# ---- the others ----


def _fsdp2(place: Place) -> Training:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # What the network returns is a view, which nobody writes to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    model: Any = place.network()
    mesh = DeviceMesh.from_group(place.group, place.device.place.type)
    for part in (*model.layers.layers, model):
        fully_shard(part, mesh=mesh)
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no ReduceOp.AVG
    return _plain_training(place, model, place.rank, place.size)


def _tensor_parallel(place: Place) -> Training:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = place.network()
    # Meshes of the same ranks and names are equal, and DTensor takes for each operation the first that it has seen.
    mesh = DeviceMesh.from_group(place.group, place.device.place.type, mesh_dim_names=(place.group.group_name,))
    for layer in model.layers.layers:
        # src_data_rank: all ranks have the same parameters already.
        parts: Any = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        parallelize_module(layer, mesh, parts, src_data_rank=None)
    return _plain_training(place, model, 0, 1, list(model.scores.parameters()))


def _pipeline(place: Place) -> Training:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = place.rank, place.size
    whole: Any = place.network()
    module = whole.keep_stage(rank, size)
    data, targets = place.batch(place.task.samples * size, rank=0)
    microbatches = _MICROBATCHES * size
    stage = PipelineStage(module, rank, size, place.device.place, group=place.making_group)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss)
    optimizer = _sgd(place, module)
    inputs_of_step = [data] if rank == 0 else []

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == size - 1:
            schedule.step(*inputs_of_step, target=targets, losses=losses)
        else:
            schedule.step(*inputs_of_step)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device="cpu")

    if place.alone:
        step()  # stages tell each other their shapes and dtypes, which nobody can who is alone
        stage.group = place.group
    return Training(step, optimizer, len(data))


# ---- the table ----


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    name: str  # what the user calls it
    about: str  # what it does, in a line
    make: Callable[[Place], Training]  # makes a network ready
    rows: tuple[tuple[Task, str], ...]  # which networks and dtypes
    quick: tuple[tuple[Task, str], ...]  # those of them that --quick measures too
    most_ranks: int = 0  # and 0 for any number
    sends: bool = False  # whether it sends messages


_FLOAT, _BFLOAT = _BOTH
_ALL = tuple((task, dtype) for task in (CNN, TRANSFORMER) for dtype in _BOTH)
_FLOATS = ((CNN, _FLOAT), (TRANSFORMER, _FLOAT))
_ONE, _TWO = ((TRANSFORMER, _FLOAT),), ((TRANSFORMER, _FLOAT), (TRANSFORMER, _BFLOAT))
_SLEEP = ((SLEEPER, _FLOAT),)
_ddp_loaded, _ddp_summed = partial(_ddp, has_loaders=True), partial(_ddp, batches_in_step=4)
_ddp_asleep = partial(_ddp, bucket_mib=4)

WAYS = (
    Way("ddp", "DistributedDataParallel, buckets of 1 MiB", _ddp, _ALL, _ALL),
    Way("ddp25", "the same, torch's own buckets of 25 MiB", partial(_ddp, bucket_mib=25), _ALL, _FLOATS),
    Way("at-once", "DDP with a comm hook that calls all_reduce and waits", partial(_ddp, at_once=True), _ALL, _FLOATS),
    Way("no-sync", "DDP, gradients of 4 batches, 3 of them in no_sync()", _ddp_summed, _FLOATS, _ONE),
    Way("fsdp2", "fully_shard of each layer", _fsdp2, _TWO, _ONE),
    Way("zero", "DDP with ZeroRedundancyOptimizer", partial(_ddp, zero=True), _FLOATS, _ONE),
    Way("pipeline", "Schedule1F1B, two microbatches for each stage", _pipeline, _ONE, _ONE, 4, sends=True),
    Way("tensor", "parallelize_module, all_reduces of 192 KiB", _tensor_parallel, _TWO, _ONE),
    Way("loaders", f"ddp, and {WORKERS} processes a rank that decode", _ddp_loaded, _FLOATS, ((CNN, _FLOAT),)),
    Way("sleep", "DDP, buckets of 4 MiB, a backward pass that leaves the core idle", _ddp_asleep, _SLEEP, _SLEEP),
)


def choose(names: Sequence[str]) -> list[Way]:
    """Return these ways; for no name, and for "all", all of them. A BadParameter: there is no such way."""
    known = {way.name: way for way in WAYS}
    if not names or list(names) == ["all"]:
        return list(WAYS)
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"no way {', '.join(unknown)}; there are {', '.join(known)}", param_hint="--train")
    return [known[name] for name in names]


def planned(ways: Sequence[Way], quick: bool, samples: int | None = None) -> list[tuple[Way, Task, str]]:
    """Return what is measured, in this order; but the sleeper with so many ``samples`` of a rank in one step."""
    sized = {task: replace(task, samples=samples) for task in (CNN, TRANSFORMER) if samples}
    return [(way, sized.get(task, task), dtype) for way in ways for task, dtype in (way.quick if quick else way.rows)]


def left_out(ways: Sequence[Way]) -> list[str]:
    """Return in words what ``--quick`` does not measure; empty if that is nothing."""
    missing = [
        f"{way.name} ({task.name}, {dtype})"
        for way in ways
        for task, dtype in way.rows
        if (task, dtype) not in way.quick
    ]
    return [f"left out by --quick: {', '.join(missing)}"] if missing else []
