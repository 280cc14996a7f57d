"""What `mpiplus bench --train` makes of its times, and which trainings it does not believe."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchmpi_plugin.cli.bench.device import Device
from torchmpi_plugin.cli.bench.measure import Turns, used
from torchmpi_plugin.cli.bench.training.models import TASKS, Task, Transformer
from torchmpi_plugin.cli.bench.training.results import Trained, what_is_wrong
from torchmpi_plugin.cli.bench.training.ways import Place

FALLING = [2.0, 1.8, 1.5]
NO_DRIFT = {"mpiplus": 0.0, "gloo": 0.0}


def turns(seconds: list[float]) -> Turns:
    return Turns(seconds=seconds, **{name: [7.0] * len(seconds) for name in used()})


def trained(step: list[float], alone: list[float], all_reduce: list[float] | None) -> Trained:
    return Trained(32, turns(step), turns(alone), all_reduce and turns(all_reduce), FALLING)


@pytest.mark.parametrize(
    ("step", "all_reduce", "waiting", "overlap"),
    [
        (0.10, 0.04, 0.0, 1.0),  # no longer than alone: all of it is hidden
        (0.12, 0.04, 1 / 6, 0.5),
        (0.20, 0.04, 0.5, 0.0),  # more than the all_reduce takes by itself: cut off
        (0.08, 0.04, 0.0, 1.0),  # shorter than alone, by chance: cut off
    ],
)
def test_shares(step: float, all_reduce: float, waiting: float, overlap: float) -> None:
    found = trained([step] * 3, [0.10] * 3, [all_reduce] * 3)
    assert (found.figures["waiting_share"], found.figures["overlap_share"]) == pytest.approx((waiting, overlap))


def test_a_turn_is_compared_with_its_neighbour() -> None:
    """On a machine that gets slower and slower, and with one turn that was disturbed."""
    found = trained([0.11, 0.21, 0.91], [0.10, 0.20, 0.30], [0.02] * 3)
    assert found.figures["exposed_seconds"] == pytest.approx(0.01)
    assert found.figures["exposed_spread_seconds"] == pytest.approx(0.0)
    assert found.figures["overlap_share"] == pytest.approx(0.5)


def test_stages_of_a_pipeline_are_the_whole_network() -> None:
    torch.manual_seed(0)
    whole = Transformer()
    text = torch.randint(1000, (2, 64))
    for stages in (1, 2, 3, 4):
        inner = text
        for stage in range(stages):
            inner = copy.deepcopy(whole).keep_stage(stage, stages)(inner)
        torch.testing.assert_close(inner, whole(text))


class NothingElsewhere(TorchDispatchMode):
    """Refuses all that makes tensors in host memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        assert not any(isinstance(one, torch.Tensor) and one.is_cpu for one in pytree.tree_leaves(made)), func
        return made


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_networks_and_batches_are_on_the_device(task: Task) -> None:
    place = Place(task, torch.float32, None, None, device=Device(torch.device("meta")))
    network, (data, targets) = place.network(), place.batch(2, 0)
    with NothingElsewhere():
        torch.nn.functional.cross_entropy(network(data), targets).backward()
    assert all(parameter.grad.is_meta for parameter in network.parameters())


@pytest.mark.parametrize(
    ("gloo", "dtype", "drift", "words"),
    [
        ([2.0, 1.8, 1.501], "float32", 0.0, ""),
        ([2.0, 1.8, 1.52], "float32", 0.0, "mpiplus and gloo train differently: losses 2, 1.8, 1.5, and 2, 1.8, 1.52"),
        ([2.0, 1.8, 1.52], "bfloat16", 0.0, ""),
        ([2.0, 1.8, 1.7], "bfloat16", 0.0, "train differently"),
        ([2.0, math.nan, 1.5], "float32", 0.0, "on gloo the loss does not fall: 2, nan, 1.5"),
        (FALLING, "float32", 0.5, "on gloo the ranks' parameters drift apart: by 0.5"),
    ],
)
def test_a_training_that_is_none(gloo: list[float], dtype: str, drift: float, words: str) -> None:
    found = what_is_wrong({"mpiplus": FALLING, "gloo": gloo}, {**NO_DRIFT, "gloo": drift}, dtype)
    assert words in found
    assert bool(found) == bool(words)
