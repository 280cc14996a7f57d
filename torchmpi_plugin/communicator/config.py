"""Configuration of a group on one rank: from its options, and from variables where those say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import settings
from ..names import describe_ranks

if TYPE_CHECKING:
    from .._shim import Lib


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
