"""Memory of a group: as the C code has taken it, also for a group that is only thought of.

Imports neither torch nor MPI, so that ``mpiplus info`` is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..node.node import Place
from .choice import OWN, Choice
from .shared_memory import SLOTS, segment_size

if TYPE_CHECKING:
    from .._shim import FFI, Lib


class Footprint(NamedTuple):
    """Bytes of memory."""

    segment: int  # in /dev/shm, of all ranks on a node together; 0 where the group has MPI's collectives
    own: int  # of one rank's own, from the beginning
    later: int  # of one rank's own, from its first long operation between nodes on

    def __str__(self) -> str:
        segment = f"{in_words(self.segment)} of /dev/shm for the ranks of this node" if self.segment else "no /dev/shm"
        later = f", and {in_words(self.later)} more from the first long collective on" if self.later else ""
        return f"{segment}, {in_words(self.own)} for this rank{later}"


def in_words(length: int) -> str:
    """A number of bytes with its unit."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if length >= 10 * unit:
            return f"{length / unit:,.0f} {name}"
    return f"{max(1, round(length / 1024)):,} KiB"


def attach(
    lib: Lib,
    ffi: FFI,
    group: int,
    address: int,
    places: Sequence[Place],
    here: int,
    sums: int,
    choice: Choice = OWN,
) -> None:
    """Give a C group the segment of its node, on which ``here`` of its ranks are, with ``GroupConfig.sums()``.

    The calls of the collectives that do not go over it are compared there.

    Raises:
        MemoryError: there is no memory for what belongs to it.
    """
    numbers = [place.node_rank for place in places]
    node_of = ffi.new("int[]", numbers) if len(set(numbers)) > 1 else ffi.NULL
    if lib.mpp_group_attach(group, address, SLOTS, segment_size(lib, places, here, choice)[1], node_of, sums):
        raise MemoryError("no memory for a group")
    choice.tell(lib, group, len(places))


def of_group(lib: Lib, ffi: FFI, group: int, segment: int, choice: Choice = OWN) -> Footprint:
    """Return the bytes of a C group with so many bytes of shared memory, for what goes over that."""
    own, later = ffi.new("size_t *"), ffi.new("size_t *")
    lib.mpp_group_bytes(group, own, later)
    return Footprint(segment if choice.own else 0, own[0], 0 if choice.only_short else later[0])


def of_layout(
    lib: Lib, ffi: FFI, places: Sequence[Place], reproducible: bool = False, choice: Choice = OWN
) -> list[Footprint]:
    """Measure a group with shared memory and ranks in these places, by node: made without its segment, and given back.

    Raises:
        MemoryError: there is no memory for it.
    """
    nowhere = ffi.new("char[]", 1)  # nobody writes to a segment before the first operation
    found = []
    for rank, place in enumerate(places):
        if place.local_rank:
            continue
        group = lib.mpp_group_new(0, rank, len(places), 0, 1 << 10, 0)
        if not group:
            raise MemoryError("no memory for a group")
        try:
            address = int(ffi.cast("uintptr_t", nowhere))
            attach(lib, ffi, group, address, places, place.local_size, int(reproducible), choice)
            found.append(of_group(lib, ffi, group, segment_size(lib, places, place.local_size)[0], choice))
        finally:
            lib.mpp_group_release(group)
    return found
