"""What a rank was asked for of a group: in its options, and in variables where those say nothing."""

from __future__ import annotations

from typing import NamedTuple

from .. import settings


class GroupConfig(NamedTuple):
    """What the group is to be like; those of its rank 0 count.

    Attributes:
        collectives: whose: "own", "mpi" or "auto".
        shares: the ranks of a node may share memory.
        reproducible: sums have the same bits wherever the ranks are, which takes collectives of our own.
    """

    collectives: str
    reproducible: bool
    shares: bool = True


def group_config(collectives: str | None, reproducible: bool | None) -> GroupConfig:
    """From what the user's ``Options`` say; None: what the variable says.

    Raises:
        ValueError: reproducible sums over collectives that can give none.
    """
    unshared = settings.unshared()
    wanted = "mpi" if unshared else collectives or settings.COLLECTIVES.value()
    if reproducible is None:
        reproducible = settings.REPRODUCIBLE.value()
    if not reproducible:
        return GroupConfig(wanted, False, not unshared)
    if wanted == "mpi":
        variable = unshared or f"{settings.COLLECTIVES.name}=mpi"
        asked = "Options(collectives='mpi')" if collectives and not unshared else variable
        raise ValueError(
            f"{asked} and reproducible sums exclude each other: the order in which MPI's collectives add depends on "
            f"where the ranks are. Leave one of the two out: of sums, Options(reproducible=False) or "
            f"{settings.REPRODUCIBLE.name}=0"
        )
    return GroupConfig("own", True)
