"""The picture of a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra plot brings it")

from matplotlib.figure import Figure
from matplotlib.image import imread

from torchmpi_plugin.cli.bench import files
from torchmpi_plugin.cli.bench.measure import Turns
from torchmpi_plugin.cli.bench.results import FRONT_END, RAW, Bus, Link, Report, Row
from torchmpi_plugin.cli.bench.training.results import Row as TrainingRow
from torchmpi_plugin.cli.bench.training.results import Trained

LINK = Link(ranks=(0, 1), hosts=("node1", "node2"), latency_us=12.0, size=1 << 24, exchange_us=16777.216)
BUS = Bus(size=1 << 24, latency_us=15.0, to_device_us=600.0, from_device_us=600.0, exchange_us=900.0)
SIZES = (8, 65536, 4194304)


def colours(picture: Path) -> int:
    """How many kinds of rows of pixels a picture has; one that is empty has one."""
    return len({row.tobytes() for row in imread(picture)})


def test_each_operation_has_a_line_for_each_contestant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    us = [{RAW: 1.0 + size / 900, "mpiplus": 5.0 + size / 1000, FRONT_END: 3.0} for size in SIZES]
    rows = [Row("all_reduce", "float32", size, 2, times, {}, {}) for size, times in zip(SIZES, us, strict=True)]
    rows.append(Row("all_reduce", "bfloat16", 8, 2, {"mpiplus": 5.0}, {}, {RAW: "no datatype"}))
    rows.append(Row("barrier", "", 0, 2, {"mpiplus": 5.0}, {}, {}))
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *words, **how: (drawn.append(self), save(self, *words, **how)))
    report = Report({"ranks": 2, "nodes": 2}, {}, (RAW, "mpiplus", FRONT_END), rows, [], LINK, BUS)
    files.draw(report, tmp_path / "out.png")
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
    files.draw_training(rows, {"ranks": 2}, tmp_path / "out.png")
    assert colours(tmp_path / "out.png") > 20
