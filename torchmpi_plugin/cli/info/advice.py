"""Problems and known slow set-ups, each with its cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...communicator.footprint import in_words
from ...flavours import OPEN_MPI, Library
from ...launchers import fit
from ...launchers.variables import Launch
from ...names import SOURCE
from ..started import TORCHRUN

_SHOWN_PAIRS = 8
_SMALL_SHARED_MEMORY = 64 << 20


class Advice(NamedTuple):
    """A finding."""

    text: str  # what is found, and what to do about it
    serious: bool  # nothing works before it is done


def advise(facts: Mapping[str, Any], launch: Launch | None, environment: Mapping[str, str]) -> list[Advice]:
    """Everything that should be said about the facts, the serious first."""
    found = [
        *_errors(facts, launch),
        *_wheels(facts),
        *_start(facts, environment),
        *_cores(facts, environment),
        *_memory(facts),
        *_group(facts),
    ]
    return sorted(found, key=lambda advice: not advice.serious)


def _errors(facts: Mapping[str, Any], launch: Launch | None) -> list[Advice]:
    found = []
    told = "no usable MPI" in facts.get("launcher_error", "")  # the same, with what to do
    if facts.get("mpi_error") and not told:
        found.append(Advice(f"MPI does not work: {facts['mpi_error']}", True))
    if "without its compiled part" in facts["versions"]["mpiplus"]:
        cure = f"reinstall it: pip install --force-reinstall --no-deps . in {SOURCE}"
        found.append(Advice(f"mpiplus lacks a compiled part; {cure}", True))
    if launch is not None and launch.size > 1 and facts.get("size") == 1:
        found.append(_worlds_of_one(facts, launch))
    if facts.get("launcher_error"):
        serious = launch is None or "mpi" not in facts
        found.append(Advice(str(facts["launcher_error"]), serious))
    return [*found, *_talking(facts)]


def _wheels(facts: Mapping[str, Any]) -> list[Advice]:
    wheels = facts.get("mpi_wheels", [])
    if len(wheels) < 2:
        return []
    names = [wheel.split()[0] for wheel in wheels]
    text = (
        f"{' and '.join(wheels)} are in one environment and have overwritten each other's mpirun, mpiexec and mpicc: "
        f"library and launcher agree by chance. Keep one: pip uninstall -y {' '.join(names)}; then pip install "
        "the one you want"
    )
    return [Advice(text, False)]


def _worlds_of_one(facts: Mapping[str, Any], launch: Launch) -> Advice:
    started = f"{launch.launcher} started {launch.size} ranks ({launch.variable}={launch.size})"
    if launch.launcher == TORCHRUN and _is_open_mpi(facts):
        text = f"{started}, and Open MPI takes only those of its own launcher: use mpiplus run -n {launch.size}"
        return Advice(text, True)
    if launch.launcher == TORCHRUN:
        text = (
            f"{started}: they are torchrun's ranks, each a world of one to MPI until "
            f'init_process_group("mpiplus") makes one MPI world of them. To try whether all can talk: '
            f"mpiplus run -n {launch.size} -m torchmpi_plugin.cli info"
        )
        return Advice(text, False)
    return Advice(fit.explain(launch, Library(**facts["library"])), True)


def _talking(facts: Mapping[str, Any]) -> list[Advice]:
    pairs, size = list(facts.get("failed_pairs", [])), facts.get("size", 1)
    node_of = {rank: name for pair in pairs for rank, name in zip(pair["ranks"], pair["hosts"], strict=True)}
    silent = [rank for rank in node_of if size > 2 and sum(rank in pair["ranks"] for pair in pairs) == size - 1]
    found = [
        Advice(f"rank {rank} on node {node_of[rank]} talks to no other rank: it is stuck, or its node is cut off", True)
        for rank in silent
    ]
    others = [pair for pair in pairs if not set(silent) & set(pair["ranks"])]
    for pair in others[:_SHOWN_PAIRS]:
        (one, other), (node, other_node) = pair["ranks"], pair["hosts"]
        names = f"rank {one} on node {node} and rank {other} on node {other_node}"
        found.append(Advice(f"{names} cannot talk ({pair['why']}). {_pair_cure(node, other_node)}", True))
    if len(others) > _SHOWN_PAIRS:
        found.append(Advice(f"{len(others) - _SHOWN_PAIRS} more pairs cannot talk; --json has all", True))
    return found


def _pair_cure(node: str, other_node: str) -> str:
    if node == other_node:
        return "On one node this is mostly shared memory: see /dev/shm and CMA above"
    return (
        "Between nodes it is a firewall, or MPI has chosen a network that does not connect them: name the right one "
        "(Open MPI: --mca btl_tcp_if_include eth0; MPICH: FI_TCP_IFACE=eth0 or UCX_NET_DEVICES=eth0)"
    )


def _is_open_mpi(facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("mpi", {}).get("vendor") == OPEN_MPI.name)


def _start(facts: Mapping[str, Any], environment: Mapping[str, str]) -> list[Advice]:
    if not _is_open_mpi(facts) or "OMPI_MCA_btl" in environment or len(facts.get("nodes", [])) > 1:
        return []
    return [
        Advice(
            "Open MPI may spend a second of MPI_Init looking for fabrics: on one node export OMPI_MCA_btl=^ofi "
            "(mpiplus run does)",
            False,
        )
    ]


def _cores(facts: Mapping[str, Any], environment: Mapping[str, str]) -> list[Advice]:
    found = []
    crowded = [place for place in facts.get("nodes", []) if len(place["ranks"]) > place["cores"]]
    slots = environment.get("OMPI_UNIVERSE_SIZE", "")
    knows = slots.isdigit() and facts.get("size", 0) > int(slots)  # then Open MPI yields by itself
    if crowded:
        place = crowded[0]
        text = f"{place['host']} has {len(place['ranks'])} ranks on {place['cores']} core(s)"
        if _is_open_mpi(facts) and environment.get("OMPI_MCA_mpi_yield_when_idle") != "1" and not knows:
            text += (
                ", and Open MPI's waiting ranks do not give way: 8,000 us instead of 7 for 8 bytes. Export "
                "OMPI_MCA_mpi_yield_when_idle=1 (mpiplus run does)"
            )
        else:
            text += "; they share them, and take longer"
        found.append(Advice(text, False))
    elif any(place["bound"] and place["cores_per_rank"] == 1 for place in facts.get("nodes", [])):
        found.append(
            Advice(
                "each rank is bound to one core, and so are all of torch's threads in it: fine with OMP_NUM_THREADS=1, "
                "else use --bind-to none (mpiplus run does)",
                False,
            )
        )
    return found


def _memory(facts: Mapping[str, Any]) -> list[Advice]:
    found = []
    shared, cma = facts["host"]["shared_memory"], facts["host"]["cma"]
    if not shared["usable"]:
        found.append(Advice(f"no shared memory ({shared['why']}): groups on one node use MPI's collectives", False))
    elif shared["free_bytes"] < _SMALL_SHARED_MEMORY:
        found.append(
            Advice(
                f"only {shared['free_bytes'] >> 20} MiB are free in /dev/shm: groups fall back to MPI's collectives "
                f"where it does not fit, and MPI may fail; Docker: --shm-size=1g",
                False,
            )
        )
    if not cma["usable"]:
        found.append(
            Advice(
                f"long messages between ranks of one node are copied twice, or fail with some MPIs: {cma['why']} "
                f"(Docker: --cap-add=SYS_PTRACE; host: sysctl kernel.yama.ptrace_scope=0)",
                False,
            )
        )
    return found


def _group(facts: Mapping[str, Any]) -> list[Advice]:
    group = facts.get("group", {})
    if "problem" in group:
        return [Advice(f"what a group costs is not known: {group['problem']}", False)]
    short = [place for place in group.get("nodes", []) if place["free_bytes"] < place["segment_bytes"]]
    return [
        Advice(
            f"a group of all ranks takes {in_words(place['segment_bytes'])} of /dev/shm on {place['host']}, where "
            f"{in_words(place['free_bytes'])} are free: the group will have MPI's collectives. Docker: --shm-size=1g; "
            f"Kubernetes: an emptyDir with medium: Memory",
            False,
        )
        for place in short[:1]
    ]
