"""What `mpiplus bench --train` makes of its times, and which trainings it does not believe."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchmpi_plugin.cli.bench import measure
from torchmpi_plugin.cli.bench.device import Device
from torchmpi_plugin.cli.bench.measure import Turns, calls_per_block, take_turns, used
from torchmpi_plugin.cli.bench.training.models import TASKS, Task, Transformer
from torchmpi_plugin.cli.bench.training.results import Trained, what_is_wrong
from torchmpi_plugin.cli.bench.training.ways import WAYS, Place, left_out

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
        (0.14, 0.04, 2 / 7, 0.0),
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


def test_noise_is_not_taken_for_overlap() -> None:
    noisy = trained([0.10, 0.20, 0.15], [0.10] * 3, [0.02] * 3)
    assert noisy.figures["exposed_spread_seconds"] == pytest.approx(0.05)
    assert not noisy.figures["overlap_is_clear"]
    assert "unclear" in noisy.cells()
    assert "50 ±0 %" in trained([0.12] * 3, [0.10] * 3, [0.04] * 3).cells()
    assert "unclear" in trained([0.12] * 2, [0.10] * 2, [0.04] * 2).cells()  # two turns tell nothing of noise


class TwoRanks:
    """A clock that only calls move; the other rank takes as long, and uses nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.order = 0.0, []
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        usage = {"cpu_seconds": 0.5, "voluntary": 8, "involuntary": 0}
        monkeypatch.setattr(measure, "used", lambda: {name: each * self.now for name, each in usage.items()})

    def call(self, name: str, seconds: float):
        def call() -> None:
            self.order.append(name)
            self.now += seconds

        return call

    def synchronise(self) -> None:
        pass

    settle = synchronise

    def slowest(self, seconds: float) -> float:
        return seconds

    def means(self, values):
        return [value / 2 for value in values]


def test_turns_are_of_one_call_and_begin_with_another_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoRanks(monkeypatch)
    calls = {"short": ranks.call("short", 1.0), "long": ranks.call("long", 4.0)}
    found = take_turns(calls, 3, 4.0, ranks)
    assert found["short"]["seconds"] == pytest.approx([1.0] * 3)
    assert found["long"]["seconds"] == pytest.approx([4.0] * 3)
    assert found["long"].medians() == pytest.approx({"seconds": 4, "cpu_seconds": 1, "voluntary": 16, "involuntary": 0})
    # Four short ones fill a turn, after one outside the clock; so does one long one.
    first, second = ["short"] * 5 + ["long"] * 2, ["long"] * 2 + ["short"] * 5
    assert ranks.order[-21:] == first + second + first


@pytest.mark.parametrize(
    ("seconds", "on_device", "calls"), [(1e-3, False, 10), (1.0, False, 1), (4e-3, False, 3), (4e-3, True, 3)]
)
def test_a_block_lasts_about_as_long_as_asked(monkeypatch, seconds: float, on_device: bool, calls: int) -> None:
    """Also where a call has only begun something, and waiting for the device takes the time."""
    ranks = TwoRanks(monkeypatch)
    call = ranks.call("block", seconds)
    if on_device:
        ranks.settle, call = call, ranks.synchronise
    assert calls_per_block(call, block_seconds=0.01, ranks=ranks) == calls


def test_quick_is_a_part_and_says_what_it_leaves_out() -> None:
    names = [way.name for way in WAYS]
    assert len(set(names)) == len(names)
    for way in WAYS:
        assert way.quick
        assert set(way.quick) <= set(way.rows)
        left = {(way.name, task.name, dtype) for task, dtype in set(way.rows) - set(way.quick)}
        assert all(f"{name} ({task}, {dtype})" in "".join(left_out([way])) for name, task, dtype in left)
        assert bool(left) == bool(left_out([way]))


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
        (FALLING, "float32", 0.0, ""),
        ([2.0, 1.8, 1.501], "float32", 0.0, ""),
        ([2.0, 1.8, 1.52], "float32", 0.0, "mpiplus and gloo train differently: losses 2, 1.8, 1.5, and 2, 1.8, 1.52"),
        ([2.0, 1.8, 1.52], "bfloat16", 0.0, ""),
        ([2.0, 1.8, 1.7], "bfloat16", 0.0, "train differently"),
        ([2.0, 1.8, 2.0], "float32", 0.0, "on gloo the loss does not fall: 2, 1.8, 2"),
        ([2.0, math.nan, 1.5], "float32", 0.0, "on gloo the loss does not fall: 2, nan, 1.5"),
        (FALLING, "float32", 0.5, "on gloo the ranks' parameters drift apart: by 0.5"),
        (FALLING, "float32", math.nan, "drift apart"),
    ],
)
def test_a_training_that_is_none(gloo: list[float], dtype: str, drift: float, words: str) -> None:
    found = what_is_wrong({"mpiplus": FALLING, "gloo": gloo}, {**NO_DRIFT, "gloo": drift}, dtype)
    assert words in found
    assert bool(found) == bool(words)
