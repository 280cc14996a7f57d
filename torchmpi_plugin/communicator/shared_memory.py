"""The memory that the ranks of a one-node group share: a file without a name, mapped by all of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

from ..host.node import Place

SLOTS = 4
SEGMENT_LIMIT = 64 << 20

#: With more nodes MPI's algorithms take fewer messages than ours, which send to every node.
MOST_NODES = 16


def slot_bytes(size: int) -> int:
    """The size of each of a rank's ``SLOTS`` slots of shared memory, in a group of ``size`` ranks on one node."""
    length = 64 << 10
    while size * SLOTS * length > SEGMENT_LIMIT and length > 4 << 10:
        length //= 2
    return length


def has_own_collectives(wanted: str, nodes: int) -> bool:
    """Whether a group on so many nodes has collectives of our own, if rank 0 wants these."""
    return wanted == "own" or (wanted == "auto" and nodes <= MOST_NODES)


def segment_size(lib: Any, places: Sequence[Place], here: int) -> tuple[int, int]:
    """The bytes of the segment on a node with ``here`` of the ranks, and of a slot, which is the same on all nodes."""
    of_slot = slot_bytes(max(place.local_size for place in places))
    return lib.mpp_segment_size(len(places), here, SLOTS, of_slot), of_slot


class Segment:
    """A file without a name in /dev/shm, mapped by all ranks of a one-node group."""

    def __init__(self, descriptor: int, size: int, ffi: Any) -> None:
        self.length = size
        self._map = mmap.mmap(descriptor, size)
        self._view: Any = ffi.from_buffer(self._map, require_writable=True)
        self.address = int(ffi.cast("uintptr_t", self._view))
        self._ffi = ffi

    def close(self) -> None:
        """Unmap; nothing may use the address any more."""
        self._ffi.release(self._view)
        self._map.close()


def create_file(size: int) -> int:
    # Without a name: what has one stays in memory when this process is killed before it takes the name away.
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # Not ftruncate: a full /dev/shm (64 MB in many containers) must be an error now, not a SIGBUS later.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
