"""Communicators of our own: one for each group, in torch's rank order, with its shared memory.

Everything in here happens while a group is made or freed; operations use only ``Communicator.handle``.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store

from . import agreement, allocation, mpi_runtime, node, processes
from .checkin import CheckIn
from .errors import DistBackendError
from .steps import Steps

log = logging.getLogger("torchmpi_plugin")

# The largest tags the MPI allows: most are taken by exchanges, the last two by windows. A user's lie below.
OWN_TAGS, WINDOW_TAGS = 1024, 2
SLOTS = 4
SEGMENT_LIMIT = 64 << 20


def slot_bytes(size: int) -> int:
    """The size of each of a rank's ``SLOTS`` slots of shared memory, in a group of ``size`` ranks on one node."""
    length = 64 << 10
    while size * SLOTS * length > SEGMENT_LIMIT and length > 4 << 10:
        length //= 2
    return length


class Place(NamedTuple):
    """Where the group's ranks live; computed once from one exchange, so all answers agree."""

    local_rank: int
    local_size: int
    node_rank: int
    node_count: int
    cpus_on_node: int


def _place(rank: int, everybody: list[tuple[str, list[int]]]) -> Place:
    nodes = [identity for identity, _ in everybody]
    cpus = set().union(*(cpus for identity, cpus in everybody if identity == nodes[rank]))
    return Place(*node.places(nodes)[rank], len(set(nodes)), len(cpus))


class Offer(NamedTuple):
    """A file that rank 0 has open, as others find it."""

    path: str
    device: int
    inode: int


class Segment:
    """A file without a name in /dev/shm, mapped by all ranks of a one-node group."""

    def __init__(self, descriptor: int, size: int, ffi: Any) -> None:
        self._map = mmap.mmap(descriptor, size)
        self._view: Any = ffi.from_buffer(self._map, require_writable=True)
        self.address = int(ffi.cast("uintptr_t", self._view))
        self._ffi = ffi

    def close(self) -> None:
        """Unmap; nothing may use the address any more."""
        self._ffi.release(self._view)
        self._map.close()


def _create_file(size: int) -> int:
    # Without a name: what has one stays in memory when this process is killed before it takes the name away.
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # Not ftruncate: a full /dev/shm (64 MB in many containers) must be an error now, not a SIGBUS later.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _offer(descriptor: int) -> Offer:
    status = os.fstat(descriptor)
    return Offer(f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino)


def _open(offer: Offer) -> int:
    # One node by name need not mean one table of processes: containers may each have their own, where the path leads
    # to another file, or to none.
    status = os.stat(offer.path)
    if (status.st_dev, status.st_ino) != (offer.device, offer.inode):
        raise FileNotFoundError(errno.ENOENT, "a file of another process", offer.path)
    return os.open(offer.path, os.O_RDWR)


class Communicator:
    """An MPI communicator with the C group that runs operations on it.

    Attributes:
        comm: the ``mpi4py`` communicator. Ours alone: nobody else sends on it.
        base: the communicator that its ranks come from.
        handle: the C group, as an integer.
        place: where this rank is among the nodes.
        processes: the ranks' processes, where they can be seen from here.
        compares: whether a rank was asked to compare the calls; then all do.
        largest_tag: the largest tag a user may give.
        littered: messages may come that nobody will take.
        freed: it is gone, but for the handle, which stays valid as long as this object.
    """

    handle = 0
    littered = False
    _crowded = False
    freed = False

    def __init__(self, comm: Any, base: Any, steps: Steps) -> None:
        mpi, shim = mpi_runtime.mpi(), mpi_runtime.shim()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.comm, self.base = comm, base
        self._lib, self._ffi = shim.lib, shim.ffi
        self._segment: Segment | None = None
        self._descriptor = -1
        self.largest_tag = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - OWN_TAGS
        try:
            # A variable may have reached some hosts only, as mpirun forwards few: what differs is settled here.
            everybody = steps.take(lambda: (processes.this(), mpi_runtime.allowed_cpus(), agreement.wanted()))
            offer = steps.take(lambda: self._settle(everybody))[0]
            if offer is not None:
                is_shared = all(steps.take(lambda: self._map(offer)))
                steps.take(lambda: self._attach(is_shared))
        except BaseException as error:
            self.littered = steps.broken or not isinstance(error, DistBackendError)  # a Ctrl-C is this rank's alone
            self.free()
            raise
        finally:
            self._close_file()

    def _settle(self, everybody: Sequence[tuple[processes.Process, list[int], bool]]) -> Offer | None:
        """Make the group; on rank 0, if all ranks share a node, also a file for them."""
        rank, size = self.comm.Get_rank(), self.comm.Get_size()
        self.place = _place(rank, [(process.node, cpus) for process, cpus, _ in everybody])
        self.processes = [processes.if_visible(process) for process, _, _ in everybody]
        self.compares = any(wanted for _, _, wanted in everybody)
        self.handle = self._lib.mpp_group_new(
            mpi_runtime.handle_of(self.comm),
            rank,
            size,
            self.largest_tag + 1,
            OWN_TAGS - WINDOW_TAGS,
            self._is_crowded(),
        )
        if not self.handle:
            raise MemoryError("no memory for a group")
        if rank or self.place.node_count > 1 or not allocation.wanted():
            return None
        try:
            self._descriptor = _create_file(self._segment_size()[0])
        except OSError as error:
            log.info("mpiplus: no shared memory (%s); using MPI's own collectives", error)
            return None
        return _offer(self._descriptor)

    def _is_crowded(self) -> bool:
        """Whether the node has fewer cores than ranks: those of the world, of which a group may be a small part."""
        Communicator._crowded = Communicator._crowded or self.place.local_size > self.place.cpus_on_node
        return Communicator._crowded

    def _segment_size(self) -> tuple[int, int]:
        """Of all of it, and of one slot."""
        size = self.comm.Get_size()
        of_slot = slot_bytes(size)
        return self._lib.mpp_segment_size(size, SLOTS, of_slot), of_slot

    def _map(self, offer: Offer) -> bool:
        """Whether this rank can have the file in its memory."""
        try:
            if self._descriptor < 0:
                self._descriptor = _open(offer)
            self._segment = Segment(self._descriptor, self._segment_size()[0], self._ffi)
        except OSError as error:
            log.info("mpiplus: no shared memory on this rank (%s); using MPI's own collectives", error)
        return self._segment is not None

    def _attach(self, is_shared: bool) -> None:
        if self._segment is None:
            return
        if not is_shared:
            self._unmap()
        elif self._lib.mpp_group_attach(self.handle, self._segment.address, SLOTS, self._segment_size()[1]):
            raise MemoryError("no memory for a group")

    def _unmap(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_file(self) -> None:
        """The mapping stays. Rank 0 keeps the file open for as long as others may want to open it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def shares_memory(self) -> bool:
        """Whether the group's collectives go over shared memory."""
        return self._segment is not None

    def free(self) -> bool:
        """Give everything back; False (and nothing freed) while an operation is unfinished.

        The communicator itself is kept for good if a message may be left on it: MPI gives its number to the next one
        made, and then delivers there what comes late. C keeps the handle valid until this object goes.
        """
        if self.freed:
            return True
        if self.handle and self._lib.mpp_group_close(self.handle):
            return False
        self.freed = True
        if self._segment is not None:
            self._segment.close()
        with mpi_runtime.exclusive():
            if not self.littered and not self._has_unread_message():
                self.comm.Free()
        return True

    def __del__(self) -> None:
        if self.freed and self.handle:
            self._lib.mpp_group_release(self.handle)

    def _has_unread_message(self) -> bool:
        try:
            return bool(self.comm.Iprobe())
        except mpi_runtime.mpi().Exception:  # a rank has died
            return True


def create(
    base: Any, store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> tuple[Communicator, CheckIn]:
    """Make the communicator of a group whose members are all here or on their way.

    Only members call this, so it is ``MPI_Comm_create_group`` on ``base``; that call has no deadline and cannot be
    taken back, hence the check-in over the store before it, which has one and knows who is missing.

    Args:
        base: the communicator all members are part of (COMM_WORLD, or what the user gave in Options).
        store: the group's own prefix of torch's store.
        name: torch's name for the group; equal on all members.
        rank, size: this process in the new group.
        timeout: how long to wait for the other members.

    Raises:
        DistBackendError: members did not come, or do not agree with MPI on who they are, or something failed on one.
    """
    # A store may outlive a group and see another of its name: these first keys are deleted before anybody
    # leaves, and whatever comes later has a mark of this group in its keys, made by rank 0.
    doing = f"creating group {name!r}"
    door = CheckIn(store, "create", rank, size)
    mark = f"{base.Get_rank()} {secrets.token_hex(8)}"
    entries = [entry.split() for entry in door.gather("member", mark, timeout, doing)]
    members = [int(mpi_rank) for mpi_rank, _ in entries]
    if len(set(members)) != size:
        raise DistBackendError(
            f"{doing}: its {size} members are MPI ranks {members}, so some process takes part twice "
            f"or two processes were given one rank"
        )
    checkin = CheckIn(store, entries[0][1], rank, size)
    steps = Steps(checkin, timeout, doing)
    comm = steps.make(lambda: _create_group(base, members, name, doing))
    if rank == 0:  # all have read it, and wait for this rank in the first step
        door.forget("member")
    return Communicator(comm, base, steps), checkin


def _create_group(base: Any, members: list[int], name: str, doing: str) -> Any:
    """``MPI_Comm_create_group``, which the members alone call."""
    everybody = base.Get_group()
    group = everybody.Incl(members)
    try:
        return base.Create_group(group, zlib.crc32(name.encode()) & 0x7FFF)
    except mpi_runtime.mpi().Exception as error:
        raise DistBackendError(
            f"{doing}: MPI made no communicator: {error}. MPI libraries have about 2,000 to 16,000 in "
            f"all; destroy_process_group(group) gives one back"
        ) from error
    finally:
        group.Free()
        everybody.Free()
