"""The file by which ``auto`` chooses whose collectives a group has between nodes."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from torchmpi_plugin.cli.bench import tune
from torchmpi_plugin.cli.bench.results import Row
from torchmpi_plugin.communicator import tuning
from torchmpi_plugin.communicator.tuning import Tuning

ROWS = [
    {"operation": "all_reduce", "dtype": "float32", "bytes": 8, "own": 10.0, "mpi": 20.0},
    {"operation": "broadcast", "dtype": "float32", "bytes": 8, "own": 10.0, "mpi": 12.0},
]
GOOD = Tuning("mpi", 2, [3, 1], "Open MPI", "5.0.11", 1.25, ROWS)


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
    assert tuning.read(altered(path, collectives="own")) == dataclasses.replace(GOOD, collectives="own")


def test_a_group_of_that_shape_follows_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tuning.choice(str(path), 2, "Open MPI") == "mpi"
    assert not caplog.records


@pytest.mark.parametrize(("hosts", "mpi"), [(3, "Open MPI"), (2, "MPICH"), (1, "Open MPI")])
def test_another_group_is_told_once_and_does_not(
    path: Path, caplog: pytest.LogCaptureFixture, hosts: int, mpi: str
) -> None:
    with caplog.at_level(logging.WARNING, "torchmpi_plugin"):
        assert [tuning.choice(str(path), hosts, mpi) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"mpiplus: MPIPLUS_TUNING: {path} was measured on 2 nodes under Open MPI, and says nothing of a group on "
        f"{hosts} nodes under {mpi}; write one with `mpiplus bench --tune`, or unset MPIPLUS_TUNING"
    )


WRONG_TEXTS = ["", "not JSON", "[]", "3", "{}", '{"format": "mpiplus tuning"', "[" * 100_000, "\xff\xfe"]


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=range(len(WRONG_TEXTS)))
def test_garbage(path: Path, text: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^MPIPLUS_TUNING: the file {re.escape(repr(str(path)))} .*bench --tune"):
        tuning.read(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MPIPLUS_TUNING: .*missing' cannot be read: .*No such file"):
        tuning.read(tmp_path / "missing")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "is of version 2, and this mpiplus reads 1"),
        ({"version": None}, "is of version None"),
        ({"format": "else"}, "is no tuning file"),
        ({"collectives": "auto"}, "has collectives 'auto'"),
        ({"collectives": ["own"]}, "has collectives"),
        ({"hosts": 1}, "has hosts 1"),
        ({"hosts": True}, "has hosts True"),
        ({"hosts": "2"}, "has hosts '2'"),
        ({"mpi": None}, "has mpi None"),
        ({"host": 2}, "must have collectives, hosts, .* and nothing else"),
    ],
)
def test_wrong_fields(path: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tuning.read(altered(path, **fields))


def test_a_field_that_is_missing(path: Path) -> None:
    found = json.loads(path.read_text())
    del found["collectives"]
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="must have collectives"):
        tuning.read(path)


def row(own: float, mpi: float) -> Row:
    return Row("all_reduce", "float32", 8, 2, {"own": own, "mpi": mpi}, {}, {})


@pytest.mark.parametrize(
    ("times", "winner", "ratio"),
    [
        ([(1.0, 2.0), (1000.0, 1999.0)], "own", 0.5),
        ([(1.0, 4.0), (1000.0, 500.0)], "own", 0.707),  # each row counts alike, however long it takes
        ([(4.0, 1.0), (500.0, 1000.0)], "mpi", 1.414),
        ([(3.0, 3.0)], "own", 1.0),
    ],
)
def test_the_winner(times: list[tuple[float, float]], winner: str, ratio: float) -> None:
    refused = Row("all_reduce", "bfloat16", 8, 2, {"own": 1.0}, {}, {"mpi": "no"})
    found = tune.choose([*(row(*pair) for pair in times), refused], ["a", "a", "b"], ("MPICH", (5, 0, 2)))
    assert (found.collectives, found.ratio) == (winner, pytest.approx(ratio, rel=1e-3))
    assert (found.hosts, list(found.ranks_per_host), found.mpi, found.mpi_version) == (2, [2, 1], "MPICH", "5.0.2")
    assert len(found.medians_us) == len(times)
