"""Groups of many shapes: ranks of one machine that believe to be on different nodes, and send each other messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi_installations import Installation, run_limited
from rank_runs import rank_arguments, run_ranks
from sampling import FULL, share

SCRIPTS = Path(__file__).parent / "scripts"
#: Nodes with one rank and several, ranks not in the order of the nodes, numbers of nodes that are no powers of two.
ALL_SHAPES = ("0,1", "0,0,1", "0,1,2", "0,1,1,2", "0,1,1,0,1", "0,1,2,0,1,3,2")
SHAPES = share("shapes of nodes", ALL_SHAPES, len(ALL_SHAPES))


@pytest.mark.every_change
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_operations(installation: Installation, tmp_path: Path, shape: str) -> None:
    """Every operation on every type, long ones, and calls on which the ranks do not agree."""
    ranks, reports = len(shape.split(",")), tmp_path / "reports"
    reports.mkdir()
    table = "test_operations and (all_reduce or broadcast or reduce or all_gather)"
    share = "test_shapes or test_all_reduce" if installation.vendor == "Open MPI" else "test_dtypes"
    keyword = f"test_disagreements or ({table if FULL else share})"
    command = installation.command(ranks, rank_arguments(reports, keyword))
    environment = {**installation.full_environment(), "MPIPLUS_TEST_HOST_OF": shape}
    assert run_ranks(command, environment, reports, ranks, 500) > 20


@pytest.mark.timeout(600)
def test_tuning(installation: Installation, tmp_path: Path) -> None:
    """What `mpiplus bench --tune` measures; tests/mpi/test_collectives_choice.py has groups that follow such a file."""
    words = ("bench", "--tune", "--sizes", "8,64K", "--repeats", "2", "--json", "bench.json")
    command = installation.command(3, [str(SCRIPTS / "believing.py"), "0,0,1", *words])
    code, output = run_limited(command, installation.full_environment(), 200, cwd=tmp_path)
    assert code == 0, output
    file = tmp_path / "mpiplus-tuning.json"
    found = json.loads(file.read_text())
    assert (found["hosts"], found["ranks_per_host"], found["mpi"]) == (2, [2, 1], installation.vendor)
    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
    assert {row["operation"] for row in found["medians_us"]} == set(names)
    assert all(row["own"] > 0 and row["mpi"] > 0 for row in found["medians_us"])
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert measured["contestants"] == ["own", "mpi"]
    assert measured["point_to_point"]["ranks"] == [0, 2]  # the first rank of another node
    assert set(found["limits"]) == set(names)
    assert f"MPIPLUS_TUNING={file}" in output
