"""The file by which ``auto`` chooses whose collectives a group has between nodes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_in_one_process import Ranks

from torchmpi_plugin.cli.bench import tune
from torchmpi_plugin.cli.bench.results import Row
from torchmpi_plugin.communicator import tuning
from torchmpi_plugin.communicator.choice import Choice, choose
from torchmpi_plugin.communicator.tuning import Tuning

ROWS = [
    {"operation": "all_reduce", "dtype": "float32", "bytes": 8, "own": 10.0, "mpi": 20.0},
    {"operation": "broadcast", "dtype": "float32", "bytes": 8, "own": 10.0, "mpi": 12.0},
]
LIMITS = {"all_reduce": 65536, "broadcast": None, "all_gather_into_tensor": 0, "cuda_reductions": 8, "phases": 0}
GOOD = Tuning(LIMITS, 2, [3, 1], "Open MPI", "5.0.11", 1.25, ROWS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file."""
    path = tmp_path / "tuning.json"
    path.write_text(GOOD.text())
    return path


def altered(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    assert tuning.read(path) == GOOD
    assert path.read_text().count("\n    {") == len(ROWS)  # one line each
    assert tuning.read(altered(path, limits={})) == dataclasses.replace(GOOD, limits={})


def test_a_group_of_that_shape_follows_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = {row: limit for row, limit in LIMITS.items() if row != "phases"}  # which are of one node
    assert tuning.limits(str(path), 2, "Open MPI") == followed
    assert choose("auto", 2, followed).table(2, 4) == {
        "all_reduce": "own up to 65,536 B, then mpi (between nodes)",
        "broadcast": "own (between nodes)",
        "all_gather_into_tensor": "own up to 0 B, then mpi (between nodes)",
        "reduce_scatter_tensor": "own (between nodes)",
        "cuda_reductions": "staged up to 8 B, then on_device (of CUDA tensors that MPI gets)",
    }
    altered(path, hosts=1)
    assert tuning.limits(str(path), 1, "Open MPI") == {"cuda_reductions": 8, "phases": 0}
    assert not caplog.records


@pytest.mark.parametrize(("limit", "phases"), [(400, 1), (399, 2), (0, 2), (None, 1)])
def test_phases(shim_of_all_ranks: Any, limit: int | None, phases: int) -> None:
    """In one phase the last rank to call has all that it needs; in two the others have parts to reduce first."""
    ranks = Ranks(shim_of_all_ranks, 3, 4, 4096)
    mine, total, how = np.ones(100, np.float32), np.zeros((3, 100), np.float32), ranks.reduction("F32")
    for group in ranks.groups:
        Choice(True, limits={"phases": limit}).tell(ranks.lib, group, ranks.size)
    ops = [ranks.reduce("all_reduce", rank, mine, out, how, [100]) for rank, out in enumerate(total)]
    assert (ops[-1] == 0) == (phases == 1)
    ranks.finish(ops)
    ranks.release(ops)
    assert (total == 3).all()
    ranks.close()


def test_a_file_of_the_version_before(path: Path) -> None:
    old = json.loads(path.read_text()) | {"version": 2, "own_up_to": {"all_reduce": 8}}
    del old["limits"]
    path.write_text(json.dumps(old))
    assert tuning.read(path) == dataclasses.replace(GOOD, limits={"all_reduce": 8})


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, "\xff\xfe"], ids=range(5))
def test_garbage(path: Path, text: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^MPIPLUS_TUNING: the file {re.escape(repr(str(path)))} .*bench --tune"):
        tuning.read(path)


def test_wrong_fields(path: Path) -> None:
    for name, values, reason in (
        ("version", [1], "is of version 1, and this mpiplus reads 3"),
        ("format", ["else"], "is no tuning file"),
        ("limits", [["all_reduce"], {"all_reduce": -1}, {"all_reduce": True}], "has limits"),
        ("limits", [{"all_to_all": 8}], "null, for all_reduce, broadcast"),
        ("hosts", [0], "has hosts 0"),
        ("mpi", [None], "has mpi None"),
        ("host", [2], "must have limits, hosts, .* and nothing else"),
    ):
        for value in values:
            path.write_text(GOOD.text())
            with pytest.raises(ValueError, match=reason):
                tuning.read(altered(path, **{name: value}))


def row(own: float, mpi: float, size: int = 8, operation: str = "all_reduce", dtype: str = "float32") -> Row:
    return Row(operation, dtype, size, 2, {"own": own, "mpi": mpi}, {}, {})


@pytest.mark.parametrize(
    ("rows", "longest"),
    [
        ([row(1, 4), row(1000, 500, 4096)], 8),
        ([row(4, 1), row(1000, 500, 4096)], 0),
        ([row(3, 3)], None),  # with the comparison of the calls, which both have
        ([row(1, 2), row(3, 2, 64), row(1, 9, 512), row(7, 6, 4096)], 512),
        ([row(1, 2, 64, dtype="bfloat16"), row(1, 2, 64), row(2, 1, 256)], 128),  # sums of bfloat16 are float32
    ],
)
def test_the_limit_of_an_operation(rows: list[Row], longest: int | None) -> None:
    refused = Row("all_reduce", "bfloat16", 8, 2, {"own": 1.0}, {}, {"mpi": "no"})
    others = row(5, 1, 16, "broadcast")
    found = tune.choose([*rows, refused, others], ["a", "a", "b"], ("MPICH", (5, 0, 2)))
    assert found.limits == {"all_reduce": longest, "broadcast": 0}
    assert (found.hosts, list(found.ranks_per_host), found.mpi, found.mpi_version) == (2, [2, 1], "MPICH", "5.0.2")
    assert "between nodes: all_reduce own" in tune.in_words(found, Path("file.json"))


def test_phases_are_measured_on_one_node() -> None:
    """16-bit floats are not widened there."""
    ways = [
        Row("all_reduce", dtype, size, 3, dict(zip(("one_phase", "two_phases"), us, strict=True)), {}, {})
        for dtype, size, us in (("float32", 8, (1, 2)), ("bfloat16", 64, (1, 2)), ("float32", 4096, (9, 3)))
    ]
    found = tune.choose(ways, ["a"] * 3, ("MPICH", (5, 0, 2)))
    assert (found.limits, found.hosts, len(found.medians_us)) == ({"phases": 64}, 1, 3)
