"""Communicators of our own: one for each group, in torch's rank order, with its shared memory.

Everything in here happens while a group is made or freed; operations use only ``Communicator.handle``.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import Store

from . import agreement, mpi_runtime, node, processes
from .checkin import CheckIn
from .errors import DistBackendError

log = logging.getLogger("torchmpi_plugin")

# Tags that exchanges take, counted down from the largest the MPI allows; a user's tags lie below.
EXCHANGE_TAGS = 1024
SLOTS = 4
SEGMENT_LIMIT = 64 << 20


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


class Segment:
    """A file in /dev/shm that all ranks of a one-node group have mapped, already without a name."""

    def __init__(self, descriptor: int, size: int, ffi: Any) -> None:
        self._map = mmap.mmap(descriptor, size)
        self._view: Any = ffi.from_buffer(self._map, require_writable=True)
        self.address = int(ffi.cast("uintptr_t", self._view))
        self._ffi = ffi

    def close(self) -> None:
        """Unmap; nothing may use the address any more."""
        self._ffi.release(self._view)
        self._map.close()


def _create_file(path: Path | None, size: int) -> int:
    """A new file in /dev/shm; without a ``path`` one that never has a name, so that nobody's death leaves it there."""
    flags = os.O_RDWR | (os.O_TMPFILE if path is None else os.O_CREAT | os.O_EXCL)
    descriptor = os.open(path or "/dev/shm", flags, 0o600)
    try:
        # Not ftruncate: a full /dev/shm (64 MB in many containers) must be an error now, not a SIGBUS later.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        if path is not None:
            path.unlink()
        raise
    return descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _open_and_map(offer: tuple[str, tuple[int, int]], size: int, ffi: Any) -> Segment | None:
    """The segment that rank 0 has made; None where it cannot be reached, as from one container in another."""
    name, identity = offer
    with contextlib.suppress(OSError, MemoryError):
        descriptor = os.open(name, os.O_RDWR)
        try:
            # A process's number, and the files it has open, may be another's here.
            return Segment(descriptor, size, ffi) if _identity(descriptor) == identity else None
        finally:
            os.close(descriptor)
    return None


def _share(comm: Any, size: int, ffi: Any, named: bool = False) -> Segment | None:
    """A new segment that every rank of ``comm`` has mapped, or None on every rank."""
    offer: Any = None
    descriptor, segment, path = -1, None, None
    if comm.Get_rank() == 0 and os.environ.get("MPIPLUS_SHM", "1") != "0":
        path = Path(f"/dev/shm/mpiplus-{os.getuid()}-{secrets.token_hex(8)}") if named else None
        try:
            descriptor = _create_file(path, size)
            segment = Segment(descriptor, size, ffi)
            offer = str(path or f"/proc/{os.getpid()}/fd/{descriptor}"), _identity(descriptor)
        except (OSError, MemoryError) as error:
            log.info("mpiplus: no shared memory (%s); using MPI's own collectives", error)
    try:
        offer = comm.bcast(offer)
        if offer is not None and segment is None:
            segment = _open_and_map(offer, size, ffi)
        everywhere = offer is not None and all(comm.allgather(segment is not None))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        if path is not None:
            path.unlink(missing_ok=True)
    if everywhere:
        return segment
    if segment is not None:
        segment.close()
    # Where ranks do not see each other's processes, they may still see one /dev/shm.
    return None if offer is None or named else _share(comm, size, ffi, named=True)


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

    def __init__(self, comm: Any, base: Any) -> None:
        mpi, shim = mpi_runtime.mpi(), mpi_runtime.shim()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.comm, self.base = comm, base
        self._lib = shim.lib
        self._segment: Segment | None = None
        rank, size = comm.Get_rank(), comm.Get_size()
        # A variable may have reached some hosts only, as mpirun forwards few: what differs is settled here.
        everybody = comm.allgather((processes.this(), mpi_runtime.allowed_cpus(), agreement.wanted()))
        self.place = _place(rank, [(process.node, cpus) for process, cpus, _ in everybody])
        self.processes = [processes.if_visible(process) for process, _, _ in everybody]
        self.compares = any(wanted for _, _, wanted in everybody)
        self.largest_tag = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - EXCHANGE_TAGS
        self.handle = self._lib.mpp_group_new(
            mpi_runtime.handle_of(comm),
            rank,
            size,
            self.largest_tag + 1,
            EXCHANGE_TAGS - 1,
            self._is_crowded(),
        )
        problem = "" if self.handle else "no memory for a group"
        if self.place.node_count == 1 and not self._share_memory(size, shim.ffi):
            problem = "no memory for a group"
        self.agree(problem, "making a group")

    def _is_crowded(self) -> bool:
        """Whether the node has fewer cores than ranks: those of the world, of which a group may be a small part."""
        Communicator._crowded = Communicator._crowded or self.place.local_size > self.place.cpus_on_node
        return Communicator._crowded

    def _share_memory(self, size: int, ffi: Any) -> bool:
        """Share memory with the other ranks, where all can; False if this rank has no memory to keep it with."""
        slot_bytes = 64 << 10
        while size * SLOTS * slot_bytes > SEGMENT_LIMIT and slot_bytes > 4 << 10:
            slot_bytes //= 2
        length = self._lib.mpp_segment_size(size, SLOTS, slot_bytes)
        self._segment = _share(self.comm, length, ffi)
        if self._segment is None:
            return True
        return self.handle != 0 and not self._lib.mpp_group_attach(
            self.handle, self._segment.address, SLOTS, slot_bytes
        )

    def agree(self, problem: str, doing: str) -> None:
        """Go on together, or fail together: where one rank gave up by itself, the others would wait for it in MPI."""
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(self.comm.allgather(problem)) if text]
        if problems:
            self.free()
            raise DistBackendError(f"{doing}: {'; '.join(problems)}")

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

    Only members call this, so it is ``MPI_Comm_create_group`` on ``base``; that call has no deadline, hence
    the check-in over the store before it, which has one and knows who is missing.

    Args:
        base: the communicator all members are part of (COMM_WORLD, or what the user gave in Options).
        store: the group's own prefix of torch's store.
        name: torch's name for the group; equal on all members.
        rank, size: this process in the new group.
        timeout: how long to wait for the other members.

    Raises:
        DistBackendError: members did not come, or do not agree with MPI on who they are.
    """
    # A store may outlive a group and see another of its name: these first keys are deleted before anybody
    # leaves, and whatever comes later has a mark of this group in its keys, made by rank 0.
    door = CheckIn(store, "create", rank, size)
    mark = f"{base.Get_rank()} {secrets.token_hex(8)}"
    entries = [entry.split() for entry in door.gather("member", mark, timeout, f"creating group {name!r}")]
    members = [int(mpi_rank) for mpi_rank, _ in entries]
    if len(set(members)) != size:
        raise DistBackendError(
            f"creating group {name!r}: its {size} members are MPI ranks {members}, so some process takes part twice "
            f"or two processes were given one rank"
        )
    with mpi_runtime.exclusive():
        communicator = Communicator(_create_group(base, members, name), base)
        problem = ""
        if rank == 0:
            try:
                door.forget("member")
            except Exception as error:
                problem = str(error)
        communicator.agree(problem, f"creating group {name!r}")
    return communicator, CheckIn(store, entries[0][1], rank, size)


def _create_group(base: Any, members: list[int], name: str) -> Any:
    """``MPI_Comm_create_group``, which the members alone call."""
    everybody = base.Get_group()
    group = everybody.Incl(members)
    try:
        return base.Create_group(group, zlib.crc32(name.encode()) & 0x7FFF)
    except mpi_runtime.mpi().Exception as error:
        raise DistBackendError(
            f"creating group {name!r}: MPI made no communicator: {error}. MPI libraries have about 2,000 to 16,000 in "
            f"all; destroy_process_group(group) gives one back"
        ) from error
    finally:
        group.Free()
        everybody.Free()
