"""Groups of many shapes: ranks of one machine that believe to be on different nodes, and send each other messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mpi_installations import Installation, run_limited
from rank_runs import rank_arguments, run_ranks
from sampling import FULL, share

SCRIPTS = Path(__file__).parent / "scripts"
#: Nodes with one rank and several, ranks not in the order of the nodes, numbers of nodes that are no powers of two.
ALL_SHAPES = ("0,1", "0,0,1", "0,1,2", "0,1,1,2", "0,1,1,0,1", "0,1,2,0,1,3,2")
SHAPES = share("shapes of nodes", ALL_SHAPES, 3)
REPRODUCIBLE = {"Open MPI": ("1,0,0,1,1",), "MPICH": ("0,1,0,1",)}


@pytest.fixture
def mpi(installation: Installation) -> Installation:
    return installation


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_operations(mpi: Installation, tmp_path: Path, shape: str) -> None:
    """Every operation on every type, long ones, and calls on which the ranks do not agree."""
    ranks, reports = len(shape.split(",")), tmp_path / "reports"
    reports.mkdir()
    table = "test_operations and (all_reduce or broadcast or reduce or all_gather)"
    share = "test_shapes or test_all_reduce" if mpi.vendor == "Open MPI" else "test_dtypes"
    keyword = f"test_disagreements or ({table if FULL else share})"
    command = mpi.command(ranks, rank_arguments(reports, keyword))
    environment = {**mpi.full_environment(), "MPIPLUS_TEST_HOST_OF": shape}
    assert run_ranks(command, environment, reports, ranks, 500) > 20


def bits(mpi: Installation, hosts: str, reproducible: bool = False) -> str:
    """What all ranks of a job find the sums to be."""
    names = hosts.split(",")
    environment = {**mpi.full_environment(), "MPIPLUS_REPRODUCIBLE": str(int(reproducible))}
    code, output = run_limited(mpi.command(len(names), [str(SCRIPTS / "bits.py"), *names]), environment, 200)
    assert code == 0, output
    found = re.findall(r"bits: (\d+) (\w+)", output)
    assert len(found) == len(names) and len({word for _, word in found}) == 1, output
    return found[0][1]


@pytest.mark.timeout(900)
def test_the_same_bits_wherever_the_ranks_are(mpi: Installation) -> None:
    """If each node has an aligned block of 2^k ranks; and the same again in the next run, on every rank."""
    one_host = bits(mpi, "0,0,0,0")
    for hosts in ("0,0,1,1", "0,1,2,3", "0,0,1,2") if FULL else ("0,0,1,2",):
        assert bits(mpi, hosts) == one_host
    shuffled = bits(mpi, "0,1,0,1")
    assert shuffled != one_host
    assert not FULL or bits(mpi, "0,1,0,1") == shuffled


@pytest.mark.timeout(900)
def test_the_same_bits_on_any_layout(mpi: Installation) -> None:
    """Where they are to be reproducible; tests/unit/test_reproducible_sums.py has many more layouts."""
    shapes = ("0,1,0,1", "0,0,1,2", "1,0,0,1,1", "0,1,2,0,1") if FULL else REPRODUCIBLE[mpi.vendor]
    one_host = {count: bits(mpi, ",".join("0" * count)) for count in {len(shape.split(",")) for shape in shapes}}
    for shape in shapes:
        assert bits(mpi, shape, True) == one_host[len(shape.split(","))], shape


def believing(mpi: Installation, directory: Path, hosts: str, *words: str, tuning: str = "") -> str:
    """What a job on pretended nodes says, in this directory."""
    command = mpi.command(len(hosts.split(",")), [str(SCRIPTS / "believing.py"), hosts, *words])
    environment = {**mpi.full_environment(), "MPIPLUS_TUNING": tuning}
    code, output = run_limited(command, environment, 200, cwd=directory)
    assert code == 0, output
    return output


@pytest.mark.timeout(600)
def test_tuning(mpi: Installation, tmp_path: Path) -> None:
    """What `mpiplus bench --tune` finds is what a world on as many nodes follows, whatever it is."""
    words = ("bench", "--tune", "--sizes", "8,64K", "--repeats", "2", "--json", "bench.json")
    output = believing(mpi, tmp_path, "0,0,1", *words)
    file = tmp_path / "mpiplus-tuning.json"
    found = json.loads(file.read_text())
    assert (found["hosts"], found["ranks_per_host"], found["mpi"]) == (2, [2, 1], mpi.vendor)
    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
    assert {row["operation"] for row in found["medians_us"]} == set(names)
    assert all(row["own"] > 0 and row["mpi"] > 0 for row in found["medians_us"])
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert measured["contestants"] == ["own", "mpi"]
    assert measured["point_to_point"]["ranks"] == [0, 2]  # the first rank of another node
    assert set(found["limits"]) == set(names)
    assert f"MPIPLUS_TUNING={file}" in output
    for limits in (found["limits"], {}, dict.fromkeys(names, 100)):
        file.write_text(json.dumps({**found, "limits": limits}))
        output = believing(mpi, tmp_path, "0,1", "follow", tuning=file.name)
        own_for_all = all(limit is None for limit in limits.values())
        assert re.findall(r"follow: rank \d (\w+)", output) == ["own" if own_for_all else "both"] * 2, output
