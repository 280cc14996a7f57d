"""Configuration of a group: what its ranks were asked for, and which of two ways an operation goes, by its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import settings
from ..names import describe_ranks

if TYPE_CHECKING:
    from .._shim import Lib

#: Long data goes to every other node directly. With more nodes than this the messages are too many; MPI's algorithms
#: take fewer.
MOST_NODES = 16
#: Where a row of the table counts: in which groups, or for which tensors.
BETWEEN_NODES, ON_A_NODE = "between nodes", "on a node"
CUDA, CUDA_ON_A_NODE = "of CUDA tensors that MPI gets", "of CUDA tensors on a node"
CUDA_IN_SLOTS = "of CUDA tensors in shared memory"
_NO_LIMIT = (1 << 63) - 1


class Row(NamedTuple):
    """One line of the table of selection: up to a limit of bytes an operation goes one way, beyond it another."""

    where: str
    short: str  # the way of calls up to the limit
    long: str  # the way of longer ones
    operation: str  # that shows which is faster
    limits: tuple[str, ...] = ()  # which limits that is in C (enum mpp_limit); none: it is Python's to choose
    usual: int | None = None  # the limit where no file has another one; None: all calls go the first way
    ranks: int = 2  # that a group has at least; smaller ones know only the first way

    def counts(self, nodes: int) -> bool:
        """Return whether it counts in a group on so many nodes."""
        return self.where == CUDA or (self.where == BETWEEN_NODES) == (nodes > 1)

    def describe(self, limit: int | None) -> str:
        """Say which way calls go, with that limit."""
        return f"{self.short} up to {limit:,} B, then {self.long}" if limit is not None else self.short


def _between_nodes(operation: str, *limits: str) -> Row:
    return Row(BETWEEN_NODES, "own", "mpi", operation, limits)


#: What has no data, as a barrier, is always the comparison of calls alone, and the exchanges of blocks are always
#: messages. Short reductions of CUDA tensors are staged: two rounds of messages and their kernels cost more than the
#: copies. At 1 MiB they did on an H200, from 4 MiB on no longer. What is only moved goes from device to device on a
#: node, where it would take more than one chunk of shared memory.
SELECTION = {
    "all_reduce": _between_nodes("all_reduce", "MPP_ALL_REDUCE", "MPP_REDUCE"),
    "broadcast": _between_nodes("broadcast", "MPP_BROADCAST"),
    "all_gather_into_tensor": _between_nodes("all_gather_into_tensor", "MPP_ALL_GATHER"),
    "reduce_scatter_tensor": _between_nodes("reduce_scatter_tensor", "MPP_REDUCE_SCATTER"),
    "phases": Row(ON_A_NODE, "one_phase", "two_phases", "all_reduce", ("MPP_ONE_PHASE",), 8 << 10, 3),
    "cuda_copies": Row(CUDA_ON_A_NODE, "shared_memory", "between_devices", "broadcast", ("MPP_BUS",), 256 << 10),
    "cuda_sums": Row(CUDA_ON_A_NODE, "shared_memory", "between_devices", "all_reduce", (), 1 << 20),
    "cuda_slot_sums": Row(CUDA_IN_SLOTS, "by_processors", "on_devices", "all_reduce", (), 4 << 20),
    "cuda_reductions": Row(CUDA, "staged", "on_device", "all_reduce", (), 2 << 20),
}


class Choice(NamedTuple):
    """A choice that all ranks of a group share."""

    own: bool  # collectives of our own, at least for some calls
    only_short: bool = False  # of our own where the data is short enough to be sent with the comparison of the calls
    limits: Mapping[str, int | None] = {}  # by row of SELECTION, where they are not the usual ones
    longest_slot: int = 1 << 30  # bytes that a slot of shared memory has at most

    @property
    def own_for_all(self) -> bool:
        """No call is MPI's."""
        return self.own and not self.only_short and not self._of_mpi()

    def limit(self, row: str) -> int | None:
        """The bytes of the longest call that goes the first of that row's ways; None: all do."""
        return self.limits.get(row, SELECTION[row].usual)

    def _of_mpi(self) -> dict[str, int]:
        """By operation the limit beyond which it is MPI's."""
        limits = {name: self.limit(name) for name, row in SELECTION.items() if row.where == BETWEEN_NODES}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def tell(self, lib: Lib, group: int, ranks: int) -> None:
        """Tell a C group of so many ranks, which has just been attached to its segment."""
        for kind in () if self.own else range(lib.MPP_CALL_KINDS):
            lib.mpp_group_limit(group, kind, -1)
        for name, row in SELECTION.items() if self.own else ():
            longest = self.limit(name) if ranks >= row.ranks else None
            for limit in (getattr(lib, each) for each in row.limits):
                if self.only_short and row.where == BETWEEN_NODES:
                    longest = lib.mpp_group_piggybacks(group, limit)
                lib.mpp_group_limit(group, limit, _NO_LIMIT if longest is None else longest)

    def describe(self, nodes: int) -> str:
        """Describe the collectives of a group on so many nodes."""
        if not self.own:
            return "MPI's collectives"
        own = "shared memory" + (", and messages of our own between nodes" if nodes > 1 else "")
        if self.only_short:
            return f"{own}; MPI's collectives for what is not short"
        longest = ", ".join(f"{operation} over {limit:,} B" for operation, limit in self._of_mpi().items())
        return f"{own}; MPI's collectives for {longest}" if longest else own

    def table(self, nodes: int, ranks: int) -> dict[str, str]:
        """The rows of SELECTION in which a group of so many ranks on so many nodes has two ways, in words."""
        rows = SELECTION.items() if self.own and not self.only_short else ()
        counting = {name: row for name, row in rows if row.counts(nodes) and ranks >= row.ranks}
        return {name: f"{row.describe(self.limit(name))} ({row.where})" for name, row in counting.items()}


OWN = Choice(True)


def choose(wanted: str, nodes: int, limits: Mapping[str, int | None] | None = None) -> Choice:
    """For a group on so many nodes.

    Args:
        wanted: by its rank 0: "own", "mpi" or "auto".
        limits: by row of SELECTION, as a measurement has found, for "auto"; None: there is none.
    """
    if wanted != "auto":
        return Choice(wanted == "own")
    if limits is not None:
        return Choice(True, limits=limits)
    return Choice(True, only_short=nodes > MOST_NODES)


# ---- what a group was asked for: by its options, and by variables where those say nothing ----


class GroupConfig(NamedTuple):
    """Properties of a group; those that its rank 0 was given count."""

    collectives: str  # whose: "own", "mpi" or "auto"
    reproducible: bool  # sums have the same bits wherever the ranks are, which takes collectives of our own
    shares: bool = True  # the ranks of a node may share memory
    #: of sums of 16-bit floats that our collectives send between nodes: "float32" or "tensor", their own
    wire_dtype: str = "float32"

    def sums(self, lib: Lib) -> int:
        """As C has it."""
        if self.reproducible:
            return lib.MPP_SUMS_REPRODUCIBLE
        return lib.MPP_SUMS_NARROW if self.wire_dtype == "tensor" else lib.MPP_SUMS_USUAL


def group_config(collectives: str | None, reproducible: bool | None, wire_dtype: str | None = None) -> GroupConfig:
    """From what the user's ``Options`` say; None: what the variable says.

    Raises:
        ValueError: reproducible sums over collectives that can give none, or in a type that depends on the nodes.
    """
    unshared = settings.unshared()
    wanted = "mpi" if unshared else collectives or settings.COLLECTIVES.value()
    if reproducible is None:
        reproducible = settings.REPRODUCIBLE.value()
    wire = wire_dtype or settings.WIRE_DTYPE.value()
    if not reproducible:
        return GroupConfig(wanted, False, not unshared, wire)
    if wire == "tensor":
        asked = "Options(wire_dtype='tensor')" if wire_dtype else f"{settings.WIRE_DTYPE.name}=tensor"
        raise ValueError(
            f"{asked} and reproducible sums exclude each other: what is rounded between nodes depends on where the "
            f"ranks are"
        )
    if wanted == "mpi":
        variable = unshared or f"{settings.COLLECTIVES.name}=mpi"
        asked = "Options(collectives='mpi')" if collectives and not unshared else variable
        raise ValueError(
            f"{asked} and reproducible sums exclude each other: the order in which MPI's collectives add depends on "
            f"where the ranks are. Leave one of the two out: of sums, Options(reproducible=False) or "
            f"{settings.REPRODUCIBLE.name}=0"
        )
    return GroupConfig("own", True)


def disagreement(configs: Sequence[GroupConfig]) -> str:
    """Return a warning about ranks that were asked for different things, by rank; nothing if they agree."""
    ranks: dict[GroupConfig, list[int]] = {}
    for rank, config in enumerate(configs):
        ranks.setdefault(config, []).append(rank)
    if len(ranks) < 2:
        return ""
    asked = "; ".join(f"{describe_ranks(those, 8)}: {_in_words(config)}" for config, those in ranks.items())
    return (
        f"the ranks of a group were asked for different things, and rank 0's count ({asked}). A variable may have "
        f"reached some nodes only: mpirun -x NAME hands it on, mpiplus run does by itself"
    )


def _in_words(config: GroupConfig) -> str:
    memory = "" if config.shares else ", no shared memory"
    sums = ", reproducible sums" if config.reproducible else ""
    wire = "" if config.wire_dtype == "float32" else ", sums of 16-bit floats sent as they are"
    return f"{config.collectives} collectives{memory}{sums}{wire}"
