"""What `mpiplus bench --train` makes of its times, and which trainings it does not believe."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from torchmpi_plugin.cli.models import TASKS
from torchmpi_plugin.cli.report import open_console
from torchmpi_plugin.cli.training_results import Row, Trained, print_rows, what_is_wrong

FALLING = [2.0, 1.8, 1.5]
NO_DRIFT = {"mpiplus": 0.0, "gloo": 0.0}


def trained(step: list[float], alone: list[float], all_reduce: list[float]) -> Trained:
    return Trained(32, step, alone, all_reduce, FALLING)


def test_samples_are_those_of_the_median_turn() -> None:
    assert trained([0.1, 9.0, 0.2], [0.1] * 3, [0.1] * 3).samples_per_second == pytest.approx(160)


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
    assert (found.waiting, found.overlap) == pytest.approx((waiting, overlap))


def test_a_turn_is_compared_with_its_neighbour() -> None:
    """On a machine that gets slower and slower, and with one turn that was disturbed."""
    found = trained([0.11, 0.21, 0.91], [0.10, 0.20, 0.30], [0.02] * 3)
    assert found.exposed == pytest.approx(0.01)
    assert found.spread == pytest.approx(0.0)
    assert found.overlap == pytest.approx(0.5)


def test_noise_is_not_taken_for_overlap() -> None:
    noisy = trained([0.10, 0.20, 0.15], [0.10] * 3, [0.02] * 3)
    assert noisy.spread == pytest.approx(0.05)
    assert not noisy.overlap_is_clear
    assert noisy.cells()[-1] == "unclear"
    assert trained([0.12] * 3, [0.10] * 3, [0.04] * 3).cells()[-1] == "50 ±0 %"
    assert trained([0.12] * 2, [0.10] * 2, [0.04] * 2).cells()[-1] == "unclear"  # two turns tell nothing of noise


def test_what_is_printed_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = trained([0.1] * 3, [0.1] * 3, [0.1] * 3), trained([0.2] * 3, [0.1] * 3, [0.1] * 3)
    rows = [Row("CNN", "float32", [8, 4], {"mpiplus": fast, "gloo": slow})]
    print_rows(open_console(rank=0), rows)
    printed = capsys.readouterr().out
    (found,) = json.loads(json.dumps([row.to_json() for row in rows]))
    assert found["ratio"] == {"mpiplus/gloo": pytest.approx(2.0)}
    assert found["bucket_bytes"] == [8, 4]
    assert found["backends"]["gloo"]["waiting_share"] == pytest.approx(0.5)
    assert found["backends"]["gloo"]["turns_seconds"]["step"] == [0.2] * 3
    assert all(len(line) <= 132 for line in printed.splitlines())
    for words in ("mpiplus/gloo", "2.00", "320", "160", "50.0 ±0.0 %", "overlap"):
        assert words in printed


def test_one_backend_is_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("CNN", "float32", [8], {"gloo": trained([0.1], [0.1], [0.1])})
    assert row.ratios() == {}
    print_rows(open_console(rank=0), [row])
    assert "gloo" in capsys.readouterr().out


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_networks_learn_their_batch(task, dtype) -> None:
    torch.manual_seed(0)
    network = task.make().to(dtype)
    data, targets = task.batch(torch.Generator().manual_seed(1), 2, dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=task.learning_rate)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(data).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("option", [("--ops", "barrier"), ("--sizes", "8"), ("--no-raw",)])
def test_options_of_the_table_of_operations_are_refused(option: tuple[str, ...]) -> None:
    """In a process of its own: the command loads MPI."""
    command = [sys.executable, "-m", "torchmpi_plugin.cli", "bench", "--train", *option]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 2
    assert "does not go with --train" in result.stderr
