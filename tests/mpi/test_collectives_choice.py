"""Whose collectives a group has, mpiplus's own or the MPI library's: as its rank 0 was asked."""

from __future__ import annotations

import errno
import logging
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expected import as_bytes

from torchmpi_plugin import Options
from torchmpi_plugin.communicator import choice, communicator, tuning
from torchmpi_plugin.communicator.choice import GroupConfig
from torchmpi_plugin.communicator.tuning import Tuning
from torchmpi_plugin.group import splitting
from torchmpi_plugin.node import node

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> None:
    """Whatever the tests run with."""
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "auto")


@pytest.fixture
def two_hosts(world, monkeypatch) -> None:
    """The ranks believe to be on two."""
    monkeypatch.setattr(tuning, "_warned", set())
    monkeypatch.setattr(node, "identity", lambda: f"node {world.rank % 2}")


def check(group: dist.ProcessGroup, own: bool, own_for_all: bool | None = None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((70_001,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert (tensor == size * (size - 1) / 2).all()
    parts = [torch.empty(3, dtype=torch.bfloat16) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank), dtype=torch.bfloat16), group=group)
    assert [part[2].item() for part in parts] == list(range(size))
    assert group.communicator.choice.own == own
    assert group.communicator.choice.own_for_all == (own if own_for_all is None else own_for_all)


@pytest.mark.parametrize(
    ("option", "of_rank_0", "of_others", "own"),
    [
        *(("own", "mpi", "mpi", True), ("mpi", "own", "own", False), ("auto", "own", "own", True)),
        *((None, "own", "mpi", True), (None, "mpi", "own", False), ("own", "mpi-only", "auto", False)),
    ],
)
def test_what_is_asked_for(world, new_group, monkeypatch, option, of_rank_0: str, of_others: str, own: bool) -> None:
    """An option comes before the variable of rank 0, unless memory may not be shared."""
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", of_others if world.rank else of_rank_0)
    check(new_group(None, **({"pg_options": Options(collectives=option)} if option else {})), own)


@pytest.mark.parametrize("wanted", ["auto", "own"])
def test_many_nodes(two_hosts, new_group, monkeypatch, wanted: str) -> None:
    monkeypatch.setattr(choice, "MOST_NODES", 1)
    check(new_group(None, pg_options=Options(collectives=wanted)), True, wanted == "own")


@pytest.mark.parametrize("by", ["option", "variable"])
def test_reproducible_sums_are_ours(world, two_hosts, new_group, monkeypatch, by: str) -> None:
    """Also on more nodes than MPI's collectives are for; as rank 0 has it."""
    monkeypatch.setenv("MPIPLUS_REPRODUCIBLE", "1" if by == "variable" and world.rank == 0 else "0")
    monkeypatch.setattr(choice, "MOST_NODES", 1)
    asked = True if by == "option" and world.rank == 0 else None
    group = new_group(None, pg_options=Options(reproducible=asked))
    check(group, True)
    assert group.communicator.config == GroupConfig("own", True)


@pytest.mark.parametrize(("variables", "asked", "named"), [
    ({}, {"collectives": "mpi", "reproducible": True}, r"Options\(collectives='mpi'\)"),
    ({"COLLECTIVES": "mpi", "REPRODUCIBLE": "1"}, {}, "MPIPLUS_COLLECTIVES=mpi"),
    ({"COLLECTIVES": "mpi-only"}, {"collectives": "own", "reproducible": True}, "MPIPLUS_COLLECTIVES=mpi-only"),
    ({"REPRODUCIBLE": "1"}, {"wire_dtype": "tensor"}, r"Options\(wire_dtype='tensor'\)"),
    ({"WIRE_DTYPE": "tensor"}, {"reproducible": True}, "MPIPLUS_WIRE_DTYPE=tensor"),
])  # fmt: skip
def test_what_reproducible_sums_exclude(world, monkeypatch, variables, asked, named: str) -> None:
    """An error on each rank that is asked for both, before it goes to the others."""
    for name, value in variables.items():
        monkeypatch.setenv(f"MPIPLUS_{name}", value)
    with pytest.raises(ValueError, match=f"{named} and reproducible sums exclude each other"):
        dist.new_group(None, pg_options=Options(**asked))


def sums(group: dist.ProcessGroup, dtype: torch.dtype) -> list[bytes]:
    """Of numbers whose sum depends on the order in which they are added: what all reductions make of them."""
    rank, size, results = group.rank(), group.size(), []
    for count in (1, 7, 1000, 4097, 100_003):
        dice = torch.Generator().manual_seed(1000 * rank + count)
        mine = (torch.randn(count, generator=dice, dtype=torch.float64) * 10.0 ** (rank % 3)).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.3 + rank)):
            results.append(mine.clone())
            dist.all_reduce(results[-1], op, group=group, async_op=True).wait()
        results += [mine.clone(), torch.empty_like(mine)]
        dist.reduce(results[-2], count % size, group=group)
        dist.broadcast(results[-2], count % size, group=group)
        dist.reduce_scatter(results[-1], [mine] * size, group=group)
    return [as_bytes(result).numpy().tobytes() for result in results]


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "float8_e5m2"])
def test_reproducible_sums_have_the_bits_of_one_node(name: str, world, new_group, monkeypatch) -> None:
    """On any layout; others only where each node has an aligned block of 2^k ranks."""
    found: dict[tuple[str, bool], list[bytes]] = {}
    for layout, number in {"one": 0, "pairs": world.rank // 2, "in turn": world.rank % 2}.items():
        monkeypatch.setattr(node, "identity", lambda number=number: f"node {number}")
        for reproducible in (False, True):
            group = new_group(None, pg_options=Options(collectives="own", reproducible=reproducible))
            found[layout, reproducible] = sums(group, getattr(torch, name))
    one = found.pop(("one", False))
    others = found.pop(("in turn", False))
    assert all(each == one for each in found.values())
    assert world.size == 2 or name not in ("float32", "float64") or others != one


def test_an_option_comes_before_the_variable(world, new_group, monkeypatch) -> None:
    monkeypatch.setenv("MPIPLUS_REPRODUCIBLE", "1")
    check(new_group(None, pg_options=Options(reproducible=False, collectives="mpi")), False)
    monkeypatch.setenv("MPIPLUS_WIRE_DTYPE", "tensor")
    check(new_group(None, pg_options=Options(reproducible=True, wire_dtype="float32")), True)


def test_reproducible_sums_without_shared_memory(world, new_group, monkeypatch) -> None:
    """No group rather than one with other sums; the next one is made as if nothing had been."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(communicator, "create_file", full)
        with pytest.raises(dist.DistBackendError, match=r"No space left on device.*reproducible"):
            dist.new_group(None, pg_options=Options(reproducible=True))
    check(new_group(None, pg_options=Options(reproducible=True)), True)


@pytest.mark.parametrize("by", ["option", "variable"])
def test_narrow_sums_between_nodes(world, two_hosts, new_group, monkeypatch, by: str) -> None:
    """As rank 0 has it; with small integers the result is exact."""
    monkeypatch.setenv("MPIPLUS_WIRE_DTYPE", "tensor" if by == "variable" and world.rank == 0 else "float32")
    asked = "tensor" if by == "option" and world.rank == 0 else None
    group = new_group(None, pg_options=Options(wire_dtype=asked))
    assert group.communicator.config.wire_dtype == "tensor"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensor = torch.arange(200_000).remainder(7).to(dtype) + world.rank
        dist.all_reduce(tensor, group=group)
        wanted = torch.arange(200_000).remainder(7) * world.size + sum(range(world.size))
        assert torch.equal(tensor.long(), wanted)


def test_a_group_split_off_has_the_config_of_its_parent(world, new_group) -> None:
    parent = new_group(None, pg_options=Options(reproducible=True))
    part = splitting.part(parent, dist.PrefixStore("config/", parent._store), list(range(world.size)), "config", None)
    assert part.communicator.config == GroupConfig("own", True)
    dist.barrier(group=parent)
    part.communicator.free()


def tuning_file(directory: Path, limits: dict[str, int | None], vendor: str, hosts: int = 2) -> str:
    path = directory / "tuning.json"
    path.write_text(Tuning(limits, hosts, [1] * hosts, vendor, "1.0", 1.0, []).text())
    return str(path)


@pytest.fixture
def vendor() -> str:
    """The MPI's."""
    from mpi4py import MPI

    return MPI.get_vendor()[0]


@pytest.mark.parametrize(
    "limits", [{}, {"all_reduce": None}, {"all_reduce": 1000, "all_gather_into_tensor": 0}], ids=str
)
def test_a_tuning_file_of_rank_0(world, two_hosts, new_group, monkeypatch, tmp_path, vendor: str, limits) -> None:
    """It alone needs the file."""
    file = tuning_file(tmp_path, limits, vendor) if world.rank == 0 else str(tmp_path / "missing")
    monkeypatch.setenv("MPIPLUS_TUNING", file)
    for group in new_group(None), new_group(None, pg_options=Options(collectives="auto")):
        check(group, True, limits.get("all_reduce") is None)


#: Of sums: bfloat16's are twice as long as their elements.
LIMIT = 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_calls_are_mpi_s(world, two_hosts, new_group, monkeypatch, tmp_path, vendor: str, dtype) -> None:
    """Each operation has its limit, up to which it is ours; both ways give the same, and disagreement is told."""
    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
    monkeypatch.setenv("MPIPLUS_TUNING", tuning_file(tmp_path, dict.fromkeys(names, LIMIT), vendor))
    group, size = new_group(None, timeout=timedelta(seconds=30)), world.size
    for extra in (0, 1):
        count = LIMIT // 4 // size * size + extra * size  # of a sum's elements, divided among all ranks
        ours = torch.arange(count).remainder(5).to(dtype)
        total = ours.clone() + world.rank
        dist.all_reduce(total, group=group)
        assert torch.equal(total.float(), ours.float() * size + sum(range(size)))
        part = torch.empty(count // size, dtype=dtype)
        dist.reduce_scatter_tensor(part, ours + world.rank, group=group)
        assert torch.equal(part, total.chunk(size)[world.rank])
        whole = torch.empty(count, dtype=dtype)
        dist.all_gather_into_tensor(whole, part, group=group)
        assert torch.equal(whole, total)
        sent = ours.clone() if world.rank == size - 1 else torch.zeros_like(ours)
        dist.broadcast(sent, size - 1, group=group)
        assert torch.equal(sent, ours)
    for mine in (3, 2 * LIMIT):  # one rank's call is ours, and the others' are MPI's; and the other way round
        length = mine if world.rank == 0 else 2 * LIMIT + 3 - mine
        with pytest.raises(dist.DistBackendError, match="disagree"):
            dist.all_reduce(torch.ones(length, dtype=dtype), group=group)
    check(group, True, False)


@pytest.mark.parametrize("wanted", ["own", "mpi"])
def test_what_is_asked_for_comes_before_a_tuning_file(two_hosts, new_group, monkeypatch, tmp_path, wanted) -> None:
    """The file is not even read."""
    monkeypatch.setenv("MPIPLUS_TUNING", str(tmp_path / "missing"))
    check(new_group(None, pg_options=Options(collectives=wanted)), wanted == "own")


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("limit", [0, 64, None])
def test_a_tuning_file_on_one_host(
    world, two_hosts, new_group, monkeypatch, tmp_path, vendor: str, limit: int | None, hosts: int
) -> None:
    """It says when all_reduce takes two phases, and nothing of MPI's collectives."""
    monkeypatch.setattr(node, "identity", lambda: "one node")
    file = tuning_file(tmp_path, {"phases": limit, "all_reduce": 0}, vendor, hosts)
    monkeypatch.setenv("MPIPLUS_TUNING", file)
    group = new_group(None)
    check(group, True)
    usual = choice.SELECTION["phases"].usual
    assert group.communicator.choice.limit("phases") == (limit if hosts == 1 else usual)


@pytest.mark.parametrize("other", ["hosts", "MPI"])
def test_a_tuning_file_of_another_shape(
    world, two_hosts, new_group, monkeypatch, tmp_path, caplog, vendor: str, other: str
) -> None:
    """A warning of rank 0, and the usual rule."""
    file = tuning_file(
        tmp_path, {"all_reduce": 0}, vendor if other == "hosts" else "Other MPI", 7 if other == "hosts" else 2
    )
    monkeypatch.setenv("MPIPLUS_TUNING", file)
    with caplog.at_level(logging.WARNING, "torchmpi_plugin"):
        check(new_group(None), True)
    told = [record for record in caplog.records if "says nothing of a group on 2 nodes" in record.getMessage()]
    assert len(told) == (world.rank == 0)


def test_a_tuning_file_that_is_none(world, two_hosts, new_group, monkeypatch, tmp_path) -> None:
    """An error on every rank, at once, and the next group is made."""
    garbage = tmp_path / "garbage.json"
    garbage.write_text("banana")
    monkeypatch.setenv("MPIPLUS_TUNING", str(garbage) if world.rank == 0 else "")
    reason = r"failed on rank 0: ValueError: MPIPLUS_TUNING: the file .*garbage.json' cannot be read.*bench --tune"
    with pytest.raises(dist.DistBackendError, match=reason):
        new_group(None)
    monkeypatch.delenv("MPIPLUS_TUNING")
    check(new_group(None), True)


def test_another_word() -> None:
    for wrong, kind, words in (
        ({"collectives": "nccl"}, ValueError, "'auto', 'own', 'mpi' or None, not 'nccl'"),
        ({"wire_dtype": "bfloat16"}, ValueError, "'float32', 'tensor' or None, not 'bfloat16'"),
        ({"reproducible": "yes"}, TypeError, "True, False or None, not 'yes'"),
    ):
        with pytest.raises(kind, match=words):
            Options(**wrong)
