"""The memory that a group's ranks on a node share, a file without a name mapped by all of them; and all that it takes.

That as the C code has taken it, also for a group that is only thought of. Imports neither torch nor MPI, so that
``mpiplus info`` is quick.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..node.node import Place
from .choice import OWN, Choice

if TYPE_CHECKING:
    from .._shim import FFI, Lib

SLOTS = 4
#: The longest slots, and the most that those of a node's ranks take together; what long slots take, and short ones.
#: Long: a rank that has the core fills and reduces half a ring before it lets go, and each hand-over of a core that
#: others want takes a time slice. Between nodes: what is a good message.
_LONG, _LONG_LIMIT = 256 << 10, 4 << 20
_USUAL, SEGMENT_LIMIT = 64 << 10, 64 << 20
_SHORTEST = 4 << 10


def slot_bytes(size: int, nodes: int = 1) -> int:
    """The size of each of a rank's ``SLOTS`` slots of shared memory, in a group with ``size`` ranks on a node."""
    length = _LONG if nodes == 1 else _USUAL
    while length > _SHORTEST and size * SLOTS * length > (_LONG_LIMIT if length > _USUAL else SEGMENT_LIMIT):
        length //= 2
    return length


def segment_size(lib: Lib, places: Sequence[Place], here: int, choice: Choice = OWN) -> tuple[int, int]:
    """The bytes of the segment on a node with ``here`` of the ranks, and of a slot, which is the same on all nodes.

    Where the collectives are MPI's, slots carry no data, but, on one node, two lengths for each rank, to say which do
    not agree.
    """
    most, nodes = max(place.local_size for place in places), len({place.node_rank for place in places})
    lines = -(-16 * most // 64) if nodes == 1 else 1
    of_slot = min(slot_bytes(most, nodes), choice.longest_slot if choice.own else 64 * lines)
    return lib.mpp_segment_size(len(places), here, SLOTS, of_slot), of_slot


class Segment:
    """A file without a name in /dev/shm, mapped by all ranks of a node; descriptor -1: memory of this process alone.

    C maps it: Python's mmap keeps a descriptor of its own open as long as the memory. An OSError if that fails.
    """

    def __init__(self, lib: Lib, ffi: FFI, descriptor: int, size: int) -> None:
        self._lib, self.length = lib, size
        self.address = int(lib.mpp_map(descriptor, size))
        if not self.address:
            raise OSError(ffi.errno, os.strerror(ffi.errno))

    def close(self) -> None:
        self._lib.mpp_unmap(self.address, self.length)


def create_file(size: int, later: int = 0) -> int:
    """A file of ``size`` bytes of memory, and ``later`` more that are none before somebody has them in his hands.

    Without those where there is no room for them: who registers them would take what is left, and be refused then.
    """
    # Without a name: what has one stays in memory when this process is killed before it takes the name away.
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # Not ftruncate: a full /dev/shm (64 MB in many containers) must be an error now, not a SIGBUS later.
        os.posix_fallocate(descriptor, 0, size)
        room = os.fstatvfs(descriptor)  # of no blocks where there is no limit
        os.truncate(descriptor, size + (later if not room.f_blocks or room.f_bavail * room.f_frsize >= later else 0))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# ---- how much a group takes ----


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
    lib: Lib, ffi: FFI, group: int, address: int, places: Sequence[Place], here: int, sums: int, choice: Choice = OWN
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
