"""Problems and known slow set-ups, each with its cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...communicator.shared_memory import in_words
from ...flavours import OPEN_MPI, Library
from ...launchers.variables import TORCHRUN, Launch, explain_misfit
from ...names import SOURCE, counted

_SHOWN_PAIRS = 8
_SMALL_SHARED_MEMORY = 64 << 20


class Advice(NamedTuple):
    """A finding."""

    text: str  # what is found, and what to do about it
    serious: bool = False  # nothing works before it is done


def advise(facts: Mapping[str, Any], launch: Launch | None, environment: Mapping[str, str]) -> list[Advice]:
    """Everything that should be said about the facts, the serious first."""
    found = [
        *_errors(facts, launch),
        *_moved(facts, launch, environment),
        *_talking(facts),
        *_wheels(facts),
        *_start(facts, environment),
        *_cores(facts, environment),
        *_memory(facts),
        *_group(facts),
    ]
    return sorted(found, key=lambda advice: not advice.serious)


def _errors(facts: Mapping[str, Any], launch: Launch | None) -> Iterator[Advice]:
    told = "no usable MPI" in facts.get("launcher_error", "")  # the same, with what to do
    if facts.get("mpi_error") and not told:
        yield Advice(f"MPI does not work: {facts['mpi_error']}", True)
    if "without its compiled part" in facts["versions"]["mpiplus"]:
        cure = f"reinstall it: pip install --force-reinstall --no-deps . in {SOURCE}"
        yield Advice(f"mpiplus lacks a compiled part; {cure}", True)
    if launch is not None and launch.size > 1 and facts.get("size") == 1:
        yield _worlds_of_one(facts, launch)
    if facts.get("launcher_error"):
        yield Advice(str(facts["launcher_error"]), launch is None or "mpi" not in facts)


def _moved(facts: Mapping[str, Any], launch: Launch | None, environment: Mapping[str, str]) -> Iterator[Advice]:
    """An Open MPI before 5 looks for its files where it was built; only the mpirun of the wheel says where they are."""
    library = Library(**facts["library"]) if "library" in facts else None
    if library is None or not facts.get("mpi_error") or launch is not None or "OPAL_PREFIX" in environment:
        return
    if library.flavour is OPEN_MPI and library.major < 5 and library.path:
        place = Path(library.path).parent.parent
        yield Advice(
            f"if that Open MPI was moved here, as by pip: export OPAL_PREFIX={place}; or start with its mpirun"
        )


def _wheels(facts: Mapping[str, Any]) -> Iterator[Advice]:
    wheels = facts.get("mpi_wheels", [])
    if len(wheels) > 1:
        names = [wheel.split()[0] for wheel in wheels]
        yield Advice(
            f"{' and '.join(wheels)} are in one environment and have overwritten each other's mpirun, mpiexec and "
            f"mpicc: library and launcher agree by chance. Keep one: pip uninstall -y {' '.join(names)}; then pip "
            "install the one you want"
        )


def _worlds_of_one(facts: Mapping[str, Any], launch: Launch) -> Advice:
    if launch.launcher != TORCHRUN:
        return Advice(explain_misfit(launch, Library(**facts["library"])), True)
    started = f"{launch.launcher} started {launch.size} ranks ({launch.variable}={launch.size})"
    if _is_open_mpi(facts):
        text = f"{started}, and Open MPI takes only those of its own launcher: use mpiplus run -n {launch.size}"
        return Advice(text, True)
    return Advice(
        f"{started}: they are torchrun's ranks, each a world of one to MPI until "
        f'init_process_group("mpiplus") makes one MPI world of them. To try whether all can talk: '
        f"mpiplus run -n {launch.size} -m torchmpi_plugin.cli info"
    )


def _talking(facts: Mapping[str, Any]) -> Iterator[Advice]:
    pairs, size = list(facts.get("failed_pairs", [])), facts.get("size", 1)
    node_of = {rank: name for pair in pairs for rank, name in zip(pair["ranks"], pair["hosts"], strict=True)}
    silent = [rank for rank in node_of if size > 2 and sum(rank in pair["ranks"] for pair in pairs) == size - 1]
    for rank in silent:
        text = f"rank {rank} on node {node_of[rank]} talks to no other rank: it is stuck, or its node is cut off"
        yield Advice(text, True)
    others = [pair for pair in pairs if not set(silent) & set(pair["ranks"])]
    for pair in others[:_SHOWN_PAIRS]:
        (one, other), (node, other_node) = pair["ranks"], pair["hosts"]
        names = f"rank {one} on node {node} and rank {other} on node {other_node}"
        yield Advice(f"{names} cannot talk ({pair['why']}). {_pair_cure(node, other_node)}", True)
    if len(others) > _SHOWN_PAIRS:
        yield Advice(f"{len(others) - _SHOWN_PAIRS} more pairs cannot talk; --json has all", True)


def _pair_cure(node: str, other_node: str) -> str:
    if node == other_node:
        return "On one node this is mostly shared memory: see /dev/shm and CMA above"
    return (
        "Between nodes it is a firewall, or MPI has chosen a network that does not connect them: name the right one "
        "(Open MPI: --mca btl_tcp_if_include eth0; MPICH: FI_TCP_IFACE=eth0 or UCX_NET_DEVICES=eth0)"
    )


def _is_open_mpi(facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("mpi", {}).get("vendor") == OPEN_MPI.name)


def _start(facts: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Advice]:
    if _is_open_mpi(facts) and "OMPI_MCA_btl" not in environment and len(facts.get("nodes", [])) <= 1:
        yield Advice(
            "Open MPI may spend a second of MPI_Init looking for fabrics: on one node export OMPI_MCA_btl=^ofi "
            "(mpiplus run does)"
        )


def _cores(facts: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Advice]:
    places = facts.get("nodes", [])
    slots = environment.get("OMPI_UNIVERSE_SIZE", "")
    knows = slots.isdigit() and facts.get("size", 0) > int(slots)  # then Open MPI yields by itself
    if place := next((place for place in places if len(place["ranks"]) > place["cores"]), None):
        text = f"{place['host']} has {len(place['ranks'])} ranks on {counted(place['cores'], 'core')}"
        if _is_open_mpi(facts) and environment.get("OMPI_MCA_mpi_yield_when_idle") != "1" and not knows:
            text += (
                ", and Open MPI's waiting ranks do not give way: 8,000 us instead of 7 for 8 bytes. Export "
                "OMPI_MCA_mpi_yield_when_idle=1 (mpiplus run does)"
            )
        else:
            text += "; they share them, and take longer"
        yield Advice(text)
    elif any(place["bound"] and place["cores_per_rank"] == 1 for place in places):
        yield Advice(
            "each rank is bound to one core, and so are all of torch's threads in it: fine with OMP_NUM_THREADS=1, "
            "else use --bind-to none (mpiplus run does)"
        )


def _memory(facts: Mapping[str, Any]) -> Iterator[Advice]:
    shared, cma = facts["host"]["shared_memory"], facts["host"]["cma"]
    if not shared["usable"]:
        yield Advice(f"no shared memory ({shared['why']}): groups on one node use MPI's collectives")
    elif shared["free_bytes"] < _SMALL_SHARED_MEMORY:
        yield Advice(
            f"only {shared['free_bytes'] >> 20} MiB are free in /dev/shm: groups fall back to MPI's collectives "
            f"where it does not fit, and MPI may fail; Docker: --shm-size=1g"
        )
    if not cma["usable"]:
        yield Advice(
            f"long messages between ranks of one node are copied twice, or fail with some MPIs: {cma['why']} "
            f"(Docker: --cap-add=SYS_PTRACE; host: sysctl kernel.yama.ptrace_scope=0)"
        )


def _group(facts: Mapping[str, Any]) -> Iterator[Advice]:
    group = facts.get("group", {})
    if "problem" in group:
        yield Advice(f"what a group costs is not known: {group['problem']}")
    short = [place for place in group.get("nodes", []) if place["free_bytes"] < place["segment_bytes"]]
    for place in short[:1]:
        yield Advice(
            f"a group of all ranks takes {in_words(place['segment_bytes'])} of /dev/shm on {place['host']}, where "
            f"{in_words(place['free_bytes'])} are free: the group will have MPI's collectives. Docker: --shm-size=1g; "
            f"Kubernetes: an emptyDir with medium: Memory"
        )
