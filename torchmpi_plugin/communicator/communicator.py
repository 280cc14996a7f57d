"""Communicators of our own: one for each group, in torch's rank order, with its shared memory.

Everything in here happens while a group is made or freed; operations use only ``Communicator.handle``.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import forks, settings
from ..errors import DistBackendError
from ..mpi import runtime
from ..names import counted, log
from ..node import node, processes, shared_files
from ..node.shared_files import Share
from . import tuning
from .choice import Choice, GroupConfig, choose, disagreement
from .shared_memory import SLOTS, Footprint, Segment, attach, create_file, of_group, segment_size
from .sharing import PRIVATE, SHORT_SLOT, TAGS, Tags
from .steps import Steps


class Member(NamedTuple):
    """A rank's message to the others of its group."""

    process: processes.Process  # its process
    cpus: list[int]  # where that may run
    crowded: bool  # whether it knows that its node has fewer cores than ranks
    compares: bool  # whether it was asked to compare the calls
    config: GroupConfig  # what else it was asked for
    tuning: str  # the file that "auto" follows; empty: none
    secret: str  # a number that nobody can guess; rank 0's is the group's


@functools.cache
def _tell_once(problem: str) -> None:
    """Not for each group: a variable that some ranks lack, or a full /dev/shm, is the same for all."""
    if problem:
        log.warning("mpiplus: %s", problem)


class Communicator:
    """An MPI communicator with the C group that runs operations on it.

    Attributes:
        comm: the ``mpi4py`` communicator. Ours alone: nobody else sends on it.
        base: the communicator that its ranks come from.
        handle: the C group, as an integer.
        place: where this rank is among the nodes; computed from one exchange, so that all answers agree.
        node_count: how many nodes there are.
        processes: the ranks' processes, where they can be seen from here.
        secret: what its ranks alone know, as it was sent over MPI only.
        compares: whether a rank was asked to compare the calls; then all do.
        config: what its rank 0 was asked for.
        largest_tag: the largest tag a user may give.
        tags: those of its messages; it may share the communicator with other groups.
        may_be_sent_to: messages may come that nobody will take.
        crowded: of the class: this process knows that its node has fewer cores than ranks.
        choice: which of its collectives are MPI's, and which ways the others go.
        freed: it is gone, but for the handle, which stays valid as long as this object.
    """

    handle = 0
    may_be_sent_to = False
    crowded = False
    choice = Choice(False)
    _share: float | None = None
    freed = False

    def __init__(
        self, comm: Any, base: Any, steps: Steps, compares: bool, config: GroupConfig, tags: Tags = PRIVATE
    ) -> None:
        mpi, shim = runtime.mpi(), runtime.shim()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.comm, self.base, self.tags = comm, base, tags
        self._lib, self._ffi = shim.lib, shim.ffi
        self._segment: Segment | None = None
        self._descriptor = -1
        last_tag = TAGS - 1 if tags.shared else mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self.largest_tag = last_tag - self._lib.MPP_OWN_TAGS
        try:
            # A variable may have reached some nodes only, as mpirun forwards few: what differs is settled here.
            mine = Communicator.crowded, compares, config, settings.TUNING.value(), secrets.token_hex(16)
            # Within the step, where an error is told to all.
            everybody = steps.take(lambda: Member(processes.this(), sorted(os.sched_getaffinity(0)), *mine))
            nodes = [member.process.node for member in everybody]
            self._places, self.node_count = node.places(nodes), len(set(nodes))
            self.place = self._places[comm.Get_rank()]
            choice = self._choose(everybody[0], steps)
            offers = steps.take(lambda: self._make_group(everybody, choice))
            firsts = [rank for rank, place in enumerate(self._places) if place.local_rank == 0]  # by node
            is_shared = all(offers[first] is not None for first in firsts)
            if is_shared:
                first = firsts[self.place.node_rank]
                is_shared = all(steps.take(lambda: self._map(everybody[first].process.pid, offers[first])))
            if not is_shared and self.node_count < len(nodes):
                steps.try_mpi()
            steps.take(lambda: self._attach(is_shared, choice))
        except BaseException as error:
            # A Ctrl-C is this rank's alone.
            self.may_be_sent_to = steps.broken or not isinstance(error, DistBackendError)
            self.free()
            raise
        finally:
            self._close_file()

    def of_its_own(self) -> Any:
        """A communicator of the same ranks, which nobody shares; all of them call this."""
        group = self.comm.Get_group()
        try:
            return self.comm.Create_group(group, self.tags.first // TAGS)
        finally:
            group.Free()

    @property
    def clock_tag(self) -> int:
        """The last of the tags, of which the C group has the others: for messages that compare clocks."""
        return int(self.tags.first + self.largest_tag + self._lib.MPP_OWN_TAGS)

    def node_of(self, rank: int) -> int:
        return self._places[rank].node_rank

    def _choose(self, first: Member, steps: Steps) -> Choice:
        """As rank 0 was asked, or as its file says."""
        wanted, found = first.config.collectives, None
        if wanted == "auto" and first.tuning:
            is_first, vendor = self.comm.Get_rank() == 0, runtime.mpi().get_vendor()[0]
            found = steps.take(lambda: tuning.limits(first.tuning, self.node_count, vendor) if is_first else None)[0]
        chosen = choose(wanted, self.node_count, found)
        return chosen._replace(longest_slot=SHORT_SLOT) if self.tags.shared else chosen

    def _make_group(self, everybody: Sequence[Member], choice: Choice) -> Share | None:
        """Make the C group; on the first rank of each node also a file for those there."""
        rank, size = self.comm.Get_rank(), self.comm.Get_size()
        here = [member for member in everybody if member.process.node == everybody[rank].process.node]
        cpus_here = len(set().union(*(member.cpus for member in here)))
        # Of the world, not of the group alone; and alike on all ranks here, as it decides how data is split.
        crowded = any(member.crowded for member in here) or len(here) > cpus_here
        Communicator.crowded |= crowded
        self.processes = [processes.if_visible(member.process) for member in everybody]
        self.secret = everybody[0].secret
        self.compares = any(member.compares for member in everybody)
        self.config = everybody[0].config
        if rank == 0:
            _tell_once(disagreement([member.config for member in everybody]))
        first, count = self.largest_tag + 1, self._lib.MPP_OWN_TAGS - self._lib.MPP_WINDOW_TAGS - 1  # tags of our own
        self.handle = self._lib.mpp_group_new(runtime.handle_of(self.comm), rank, size, first, count, crowded)
        self._set_inline_progress(cpus_here)
        if not self.handle:
            raise MemoryError("no memory for a group")
        self._lib.mpp_group_tags_from(self.handle, self.tags.first)
        if self.place.local_rank or not self.config.shares or (size == 1 and not choice.own):
            return None
        try:
            length, of_slot = segment_size(self._lib, self._places, self.place.local_size, choice)
            later = self._lib.mpp_wide_bytes(size, SLOTS, of_slot) if choice.own and self.node_count == 1 else 0
            self._descriptor = create_file(length, later)
        except OSError as error:
            self._do_without(error)
            return None
        return shared_files.share(self._descriptor, os.fstat(self._descriptor).st_size)

    def _do_without(self, error: OSError) -> None:
        if self.config.reproducible:
            raise DistBackendError(
                f"no shared memory ({error}); reproducible sums, which this group was asked for, need some, as those "
                f"of MPI's own collectives are not"
            ) from error
        _tell_once(
            f"no shared memory on this rank: {error}. Groups take MPI's collectives, which are slower on one node; see "
            f"'Small /dev/shm in containers' in docs/sharp-bits.md"
        )

    def _set_inline_progress(self, cpus: int) -> None:
        """Tell C how many cores a rank of this node has to itself, once: in the world, which has all ranks."""
        if Communicator._share is None:
            Communicator._share = cpus / self.place.local_size
            self._lib.mpp_set_inline(settings.PROGRESS_OF.index(settings.ASYNC_PROGRESS.value()), Communicator._share)

    def _map(self, pid: int, offered: Share | None) -> bool:
        """Return whether this rank can have the file in its memory."""
        assert offered is not None
        try:
            if self._descriptor < 0:
                self._descriptor = shared_files.open_share(pid, offered)
            self._segment = Segment(self._lib, self._ffi, self._descriptor, offered.length)
        except OSError as error:
            self._do_without(error)
        return self._segment is not None

    def _attach(self, is_shared: bool, choice: Choice) -> None:
        """Give the C group its memory. Where MPI moves the data, that is for the comparison of calls.

        Ranks that cannot share memory compare by messages, each as if it were on a node of its own.
        """
        places, here, size = self._places, self.place.local_size, len(self._places)
        if not is_shared:
            self._unmap()
            choice = Choice(False)
            if size == 1:
                return
            places, here = [node.Place(0, 1, rank) for rank in range(size)], 1
            length, _ = segment_size(self._lib, places, here, choice)
            self._segment = Segment(self._lib, self._ffi, -1, length)
        if self._segment is not None:
            memory = self._segment.address
            attach(self._lib, self._ffi, self.handle, memory, places, here, self.config.sums(self._lib), choice)
            self.choice = choice
            if is_shared and choice.own and self.node_count == 1:
                self._lib.mpp_group_widen(self.handle, self._segment.length)

    def _unmap(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_file(self) -> None:
        """The mapping stays. Rank 0 keeps the file open for as long as others may want to open it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def describe(self) -> str:
        """The group's shape and path in words."""
        ranks = f"rank {self.comm.Get_rank()} of {len(self._places)} on {counted(self.node_count, 'node')}"
        return f"{ranks}, {self.choice.describe(self.node_count)}"

    @property
    def footprint(self) -> Footprint:
        """The memory that the group has taken; not while an operation is made."""
        segment = self._segment.length - self._lib.mpp_group_wide(self.handle) if self._segment else 0
        return of_group(self._lib, self._ffi, self.handle, segment, self.choice)

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
        self._unmap()
        with runtime.exclusive():
            if not self.tags.shared and not self.may_be_sent_to and not self._has_unread_message():
                self.comm.Free()
        return True

    def __del__(self) -> None:
        if self.freed and self.handle and forks and not forks.forked:  # no module is left at Python's very end
            self._lib.mpp_group_release(self.handle)

    def _has_unread_message(self) -> bool:
        try:
            return bool(self.comm.Iprobe())
        except runtime.mpi().Exception:  # a rank has died
            return True
