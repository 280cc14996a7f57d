"""What a group costs in memory, told without making it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

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
