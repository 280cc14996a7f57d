"""The parts of ``mpiplus bench`` that need no MPI; which trainings it does not believe; its pictures."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_python import printed, python
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchmpi_plugin.cli.bench import files as written
from torchmpi_plugin.cli.bench import measure
from torchmpi_plugin.cli.bench.device import Device
from torchmpi_plugin.cli.bench.measure import Turns, used
from torchmpi_plugin.cli.bench.report import table_cells, table_header
from torchmpi_plugin.cli.bench.results import (
    FRONT_END,
    NONBLOCKING,
    RAW,
    Bus,
    Link,
    Report,
    Row,
    bus_factor,
    fit_size,
    parse_size,
)
from torchmpi_plugin.cli.bench.training.models import CNN, SLEEPER, TRANSFORMER, Task, Transformer
from torchmpi_plugin.cli.bench.training.results import Row as TrainingRow
from torchmpi_plugin.cli.bench.training.results import Trained, what_is_wrong
from torchmpi_plugin.cli.bench.training.ways import Place

ALL = (RAW, NONBLOCKING, "mpiplus", "gloo", FRONT_END)


def test_a_size() -> None:
    """In powers of 1024; it grows to whole elements for every rank."""
    for text, size in {"8": 8, "64k": 65536, "16MiB": 16 << 20, "2 GB": 2 << 30, " 4M ": 4 << 20, "12B": 12}.items():
        assert parse_size(text) == size
    for wrong in ("", "0K", "-8", "1.5M", "1T", "K", "8 8"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)
    assert (fit_size(8, 4, 1), fit_size(8, 4, 3), fit_size(8, 4, 4), fit_size(1, 2, 1)) == (8, 12, 16, 2)


def test_cells_stand_under_their_titles() -> None:
    us = {RAW: 2.0, NONBLOCKING: 2.5, "mpiplus": 5.0, "gloo": 400.0, FRONT_END: 3.0}
    row = Row("all_reduce", "float32", 32768, 2, us, {name: [time] for name, time in us.items()}, {})
    assert dict(zip(table_header(ALL), table_cells(row, ALL), strict=True)) == {
        **{"operation": "all_reduce", "dtype": "float32", "size": "32 KiB", "raw": "2.00"},
        **{"raw\nnonblocking": "2.50", "mpiplus": "5.00", "gloo": "400", "front\nend": "3.00"},
        **{"mpiplus\nGB/s": "6.55", "mpiplus/\nraw": "2.50", "gloo/\nmpiplus": "80.00"},
    }
    barrier = table_cells(Row("barrier", "", 0, 2, {"mpiplus": 1.0}, {}, {}), ("mpiplus",))
    assert barrier == ["barrier", "-", "-", "1.00", "-"]


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """On 4 ranks, of a million bytes in a millisecond, which is 1 GB/s."""
    parts = dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"), 0.75)
    for operation, factor in {"all_reduce": 1.5, "ping_pong": 2.0, "broadcast": 1.0, **parts, "barrier": None}.items():
        found = Row(operation, "float32", 10**6, 4, {"mpiplus": 1000.0, FRONT_END: 3.0}, {}, {})
        assert found.bus_gb_per_s("mpiplus") == factor
        assert found.bus_gb_per_s(FRONT_END) is None  # it moves nothing
        assert found.bus_gb_per_s("gloo") is None  # not measured
        assert bus_factor(operation, 1) is None


#: Command lines, and why they are refused.
REFUSED = {
    "bench --ops all_reduce,all_shuffle": "no operation all_shuffle; there are all_reduce, ping_pong",
    "bench --train --ops barrier": "does not go with --train",
    "bench --train --no-raw": "does not go with --train",
    "bench --train ddp,fsdp1": "no way fsdp1; there are",
    "bench --plot out.txt": "must end in .png, .svg, .pdf",
    "bench --tune out.json --backends gloo": "does not go with --tune",
    "bench --sizes 8,9999999999G": "10,737,418,238,926,258,176 bytes are more than this node's memory",
    "info --timeout nan": "'nan' is not a number of seconds",
    "status --interval inf": "inf is not in the range",
    "status --watch nan": "--watch takes seconds",
    "status --timeline t.txt": "t.txt must end with .json, .json.gz or .html",
    "status --timeline nowhere/t.json": "there is no directory",
}
PROGRAM = """
import sys, click
from click.testing import CliRunner
from torchmpi_plugin.cli import main
from torchmpi_plugin.cli.bench import command
print(*command.parse_operations(None, None, "all_gather,barrier,reduce_scatter"))
for words in sys.argv[1:]:
    result = CliRunner().invoke(main, words.split())
    print(result.exit_code, *click.unstyle(result.output).split())
"""


@pytest.mark.timeout(120)
def test_operations_may_have_mpis_names_and_others_are_refused() -> None:
    """In a process of its own: the table of operations imports mpi4py, and that starts MPI."""
    told = printed(PROGRAM, *REFUSED).splitlines()
    assert told[0].split() == ["all_gather_into_tensor", "barrier", "reduce_scatter_tensor"]
    for line, reason in zip(told[1:], REFUSED.values(), strict=True):
        assert line.startswith("2 ") and reason in line


def test_two_ranks_on_a_host_have_nothing_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    files = written.Files(None, None, Path("tuning.json"))
    assert "or of three and more ranks on one" in files.why_not(["a", "a"])
    assert files.why_not(["a", "b"]) == files.why_not(["a", "a", "a"]) == ""
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only")
    assert "MPIPLUS_COLLECTIVES=mpi-only forbids" in files.why_not(["a", "b"])


@pytest.mark.timeout(120)
def test_a_picture_is_not_promised_without_matplotlib(tmp_path: Path) -> None:
    """Before anything is measured; in a process of its own, as above."""
    program = "import sys; sys.modules['matplotlib'] = None; from torchmpi_plugin.cli import main; main()"
    result = python(program, "bench", "--plot", tmp_path / "out.png")
    assert result.returncode == 1
    assert "Error: --plot needs matplotlib" in result.stderr and "pip install matplotlib" in result.stderr
    assert "mpiplus bench" not in result.stdout


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


def test_turns_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only calls move: four short ones fill a turn, and so does one long one."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "used", lambda: {"cpu_seconds": 0.5 * now[0]})
    ranks: Any = SimpleNamespace(synchronise=lambda: None, slowest=lambda seconds: seconds, means=lambda values: values)
    ranks.settle = ranks.synchronise
    calls: Any = {seconds: lambda seconds=seconds: now.__setitem__(0, now[0] + seconds) for seconds in (1.0, 4.0)}
    turns: Any = measure.take_turns(calls, 3, 4.0, ranks)
    for seconds, found in turns.items():
        assert found["seconds"] == pytest.approx([seconds] * 3)
        assert found["cpu_seconds"] == pytest.approx([seconds / 2] * 3)


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


@pytest.mark.parametrize("task", (CNN, TRANSFORMER, SLEEPER), ids=lambda task: task.name)
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


LINK = Link(ranks=(0, 1), hosts=("node1", "node2"), latency_us=12.0, size=1 << 24, exchange_us=16777.216)
BUS = Bus(size=1 << 24, latency_us=15.0, to_device_us=600.0, from_device_us=600.0, exchange_us=900.0)
SIZES = (8, 65536, 4194304)


def colours(picture: Path) -> int:
    """How many kinds of rows of pixels a picture has; one that is empty has one."""
    image = pytest.importorskip("matplotlib.image", reason="the extra plot brings it")
    return len({row.tobytes() for row in image.imread(picture)})


def test_each_operation_has_a_line_for_each_contestant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    us = [{RAW: 1.0 + size / 900, "mpiplus": 5.0 + size / 1000, FRONT_END: 3.0} for size in SIZES]
    rows = [Row("all_reduce", "float32", size, 2, times, {}, {}) for size, times in zip(SIZES, us, strict=True)]
    rows.append(Row("all_reduce", "bfloat16", 8, 2, {"mpiplus": 5.0}, {}, {RAW: "no datatype"}))
    rows.append(Row("barrier", "", 0, 2, {"mpiplus": 5.0}, {}, {}))
    figure, drawn = pytest.importorskip("matplotlib.figure", reason="the extra plot brings it").Figure, []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *words, **how: (drawn.append(self), save(self, *words, **how)))
    report = Report({"ranks": 2, "nodes": 2}, {}, (RAW, "mpiplus", FRONT_END), rows, [], LINK, BUS)
    written.draw(report, tmp_path / "out.png")
    assert colours(tmp_path / "out.png") > 50
    latency, bandwidth = drawn[0].axes[:2]
    assert latency.get_title(loc="left") == "all_reduce float32"
    assert [line.get_label() for line in latency.lines] == [RAW, "mpiplus", FRONT_END, "plain messages", "bus"]
    assert [next(iter(axes.lines[-1].get_ydata())) for axes in (latency, bandwidth)] == [BUS.latency_us, BUS.gb_per_s]
    assert list(latency.lines[1].get_ydata()) == [5.0 + size / 1000 for size in SIZES]
    assert list(bandwidth.lines[1].get_ydata()) == [size / (5.0 + size / 1000) / 1000 for size in SIZES]
    assert list(bandwidth.lines[2].get_ydata()) == []  # nothing moves


def test_ways_to_train(tmp_path: Path) -> None:
    """A bar per way: alone, and on each backend; none where a backend was left out."""
    turns = [Turns(seconds=[seconds] * 3) for seconds in (0.01, 0.02)]
    trained = Trained(32, turns[1], turns[0], None, [1.0])
    rows = [
        TrainingRow("ddp", "CNN", "float32", [], {"mpiplus": trained, "gloo": trained}),
        TrainingRow("fsdp2", "CNN", "float32", [], {"mpiplus": trained}),
    ]
    pytest.importorskip("matplotlib", reason="the extra plot brings it")
    written.draw_training(rows, {"ranks": 2}, tmp_path / "out.png")
    assert colours(tmp_path / "out.png") > 20
