"""A group's choice of collectives: mpiplus's own, those of the MPI library, or each where it is faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .._shim import Lib

#: Long data goes to every other node directly. With more nodes than this the messages are too many; MPI's algorithms
#: take fewer.
MOST_NODES = 16
#: Operations that can be either's, and the kinds of calls in c_src/shim.h that an operation stands for. What has no
#: data, as a barrier, is always the comparison of calls alone, and the exchanges of blocks are always messages.
KINDS = {
    "all_reduce": ("MPP_ALL_REDUCE", "MPP_REDUCE"),
    "broadcast": ("MPP_BROADCAST",),
    "all_gather_into_tensor": ("MPP_ALL_GATHER",),
    "reduce_scatter_tensor": ("MPP_REDUCE_SCATTER",),
}


class Choice(NamedTuple):
    """A choice that all ranks of a group share."""

    own: bool  # collectives of our own, at least for some calls
    only_short: bool = False  # of our own where the data is short enough to be sent with the comparison of the calls
    own_up_to: Mapping[str, int] = {}  # by operation of KINDS, bytes: of the longest call that is our own
    longest_slot: int = 1 << 30  # bytes that a slot of shared memory has at most

    @property
    def own_for_all(self) -> bool:
        """No call is MPI's."""
        return self.own and not self.only_short and not self.own_up_to

    def tell(self, lib: Lib, group: int) -> None:
        """Tell a C group, which has just been attached to its segment."""
        for kind in () if self.own else range(lib.MPP_CALL_KINDS):
            lib.mpp_group_own_up_to(group, kind, -1)
        for operation in KINDS if self.only_short else self.own_up_to:
            for kind in (getattr(lib, name) for name in KINDS[operation]):
                longest = lib.mpp_group_piggybacks(group, kind) if self.only_short else self.own_up_to[operation]
                lib.mpp_group_own_up_to(group, kind, longest)

    def describe(self, nodes: int) -> str:
        """Describe the collectives of a group on so many nodes."""
        if not self.own:
            return "MPI's collectives"
        own = "shared memory" + (", and messages of our own between nodes" if nodes > 1 else "")
        if self.only_short:
            return f"{own}; MPI's collectives for what is not short"
        longest = ", ".join(f"{operation} over {limit:,} B" for operation, limit in self.own_up_to.items())
        return f"{own}; MPI's collectives for {longest}" if longest else own


OWN = Choice(True)


def choose(wanted: str, nodes: int, own_up_to: Mapping[str, int] | None = None) -> Choice:
    """For a group on so many nodes.

    Args:
        wanted: by its rank 0: "own", "mpi" or "auto".
        own_up_to: as a measurement has found, for "auto"; None: there is none.
    """
    if wanted != "auto":
        return Choice(wanted == "own")
    if own_up_to is not None:
        return Choice(True, own_up_to=own_up_to)
    return Choice(True, only_short=nodes > MOST_NODES)
