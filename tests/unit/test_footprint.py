"""What a group costs in memory, told without making it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from torchmpi_plugin.cli.info import worker
from torchmpi_plugin.communicator import shared_memory
from torchmpi_plugin.node import node

KIB, MIB = 1 << 10, 1 << 20
#: malloc gives a few bytes more here than there.
OF_MALLOC = 512


@pytest.fixture(params=["_shim_int", "_shim_ptr"])
def shim(request):
    return importlib.import_module(f"torchmpi_plugin.{request.param}")


def cost(shim, *hosts: str) -> list[shared_memory.Footprint]:
    return shared_memory.of_layout(shim.lib, shim.ffi, node.places(hosts))


def test_on_one_host(shim) -> None:
    """As the documentation says."""
    for ranks, each in ((1, 1024), (4, 1024), (5, 512), (8, 512), (9, 256), (255, 256)):
        (found,) = cost(shim, *["a"] * ranks)
        assert each * KIB < found.segment / ranks < (each + 1) * KIB
    (found,) = cost(shim, "a", "a", "a")
    assert 0 < found.own < 4 * KIB
    assert found.later == 0


def test_between_hosts_each_has_its_own(shim) -> None:
    one, other = cost(shim, "a", "b", "a")
    from_elsewhere = shared_memory.SLOTS * 60 * KIB  # MPP_EAGER of message/message.h
    of_one_rank = other.segment - 2 * from_elsewhere
    assert 256 * KIB < of_one_rank < 257 * KIB
    assert one.segment == 2 * of_one_rank + 1 * from_elsewhere
    assert one.own == pytest.approx(other.own, abs=OF_MALLOC)
    assert one.own > 32 * KIB
    assert one.later == pytest.approx(other.later, rel=0.01)
    assert one.later > 3 * MIB


def data_bytes() -> int:
    """This process's memory, whether it has been touched or not."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_thought_of_is_given_back(shim) -> None:
    hosts = [f"node {rank % 5}" for rank in range(8)]
    (first, *_) = cost(shim, *hosts)
    before = data_bytes()
    for _ in range(200):
        cost(shim, *hosts)
    assert data_bytes() - before < 50 * first.own


class Module:
    """Of ``mpi4py.MPI`` what tells the kind of its handles."""

    Comm = object

    @staticmethod
    def _sizeof(_: object) -> int:
        return 8


def report(host: str, wants: str = "auto", problem: str = "") -> dict:
    return {
        "host": host,
        "node": f"{host} boot",
        "config": {"collectives": wants, "reproducible": False},
        "problem": problem,
        "free_bytes": 5,
    }


def test_what_info_makes_of_it() -> None:
    found = worker.cost(Module, {0: report("a"), 1: report("b"), 2: report("a")})
    assert found["path"] == "shared memory, and messages of our own between nodes"
    assert [place["host"] for place in found["nodes"]] == ["a", "b"]
    assert [place["free_bytes"] for place in found["nodes"]] == [5, 5]
    assert found["nodes"][0]["segment_bytes"] > found["nodes"][1]["segment_bytes"]


def test_on_many_nodes_nothing_comes_later() -> None:
    """What is long is MPI's there."""
    found = worker.cost(Module, {rank: report(f"h{rank}") for rank in range(17)})
    assert found["path"].endswith("messages of our own between nodes; MPI's collectives for what is not short")
    assert len(found["nodes"]) == 17
    assert all(place["segment_bytes"] > 0 and place["rank_bytes_later"] == 0 for place in found["nodes"])


def test_what_a_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "own")
    told = worker.own_report()
    assert (told["config"], told["problem"]) == (
        {"collectives": "own", "reproducible": False, "shares": True, "wire_dtype": "float32"},
        "",
    )
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only")
    assert worker.own_report()["config"]["collectives"] == "mpi"
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "fast")
    assert "MPIPLUS_COLLECTIVES" in worker.own_report()["problem"]
