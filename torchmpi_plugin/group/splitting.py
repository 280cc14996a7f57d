"""Groups made of a group's own ranks: torch's ``split_group`` and ``shrink_group``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..communicator import membership
from ..diagnosis import comparison
from ..errors import DistBackendError
from ..mpi import failures, runtime
from ..tensors.arguments import ArgumentError
from . import world
from .group import Group

_SHRINK_ABORT = 1  # torch's SHRINK_ABORT


class Splitting(Group):
    """A group that can be split and shrunk."""

    #: Gives a group what torch's hooks are attached to; None where torch has none.
    attach: Callable[[Any], None] | None = None
    #: Makes a backend for torch's own group of one of ours.
    as_backend: Callable[[Any], Any] | None = None
    _splits = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kind = type(self)  # before hooks make it another

    @property
    def supports_splitting(self) -> bool:
        """Whether ``torch.distributed.split_group`` works. Its members alone make the new group."""
        return True

    def comm_split_count(self) -> int:
        """How many groups were split off; torch makes names of it."""
        return self._splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        """What NCCL wants of ranks that are in no part: nothing here."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """What NCCL does for ``device_id=``: the group is connected already."""

    def part(self, store: dist.Store, ranks: list[int], name: str, timeout: timedelta | None) -> Any:
        """A new group of some of this group's ranks, in this order; None on a rank that is not among them.

        Args:
            store: the new group's own prefix of torch's store.
            ranks: ranks of this group.
            name: equal on all members, and new.
            timeout: how long to wait for the other members, and the new group's; this group's if None.

        Raises:
            ValueError: ranks that are not in the group, or named twice.
            DistBackendError: members that do not come in time.
        """
        runtime.refuse_in_forked_child(f"splitting {self.label}")
        wrong = [rank for rank in ranks if not 0 <= rank < self._size]
        if wrong or len({*ranks}) != len(ranks):
            raise ArgumentError(f"{self.label} has ranks 0 to {self._size - 1}; they cannot be split as {ranks}")
        self._splits += 1
        if self._rank not in ranks:
            return None
        return self._make_part(self._communicator.base, store, ranks, name, timeout or self.timeout)

    def _make_part(self, base: Any, store: dist.Store, ranks: list[int], name: str, timeout: timedelta) -> Any:
        rank, config = ranks.index(self._rank), self._communicator.config  # what its options asked for, as torch has it
        ranks_in_world = [self._global_ranks[rank] for rank in ranks]
        look = functools.partial(world.gone, ranks_in_world)
        comm, checkin = membership.create(
            *(base, store, name, rank, len(ranks), timeout, comparison.wanted(), config, look)
        )
        made = self._kind(comm, checkin, store, name, ranks_in_world, timeout)
        world.remember(made)
        if self.attach is not None:
            self.attach(made)
        return made

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> Any:
        """:meth:`part` as ``torch.distributed.split_group`` calls it; all tensors' devices stay."""
        name = group_name or f"{self._name}:split:{self._splits}"
        made = self.part(dist.PrefixStore(f"{name}/", self._store), new_ranks, name, timeout)
        if made is not None:
            made.setGroupDesc(group_desc or f"{self._description}:split:{self._splits}")
        return made

    def merge_remote_group(
        self,
        store: dist.Store,
        size: int,
        timeout: timedelta,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """One group of several, which torch's own would answer with None for a group in Python.

        Raises:
            NotImplementedError: always.
        """
        runtime.refuse_in_forked_child("merge_remote_group")
        raise NotImplementedError("merge_remote_group: groups of mpiplus cannot be merged. Make one with new_group")

    @property
    def supports_shrinking(self) -> bool:
        """Whether ``torch.distributed.shrink_group`` works: it needs torch 2.15 and an MPI with ULFM."""
        if not torch_internals.has_python_backends() or runtime.forked:
            return False
        return failures.supported(self._communicator.comm)

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """The other ranks as a backend, for ``torch.distributed.shrink_group``, which makes a group of it.

        Args:
            ranks_to_exclude: ranks of this group, dead or alive; they do not call this.
            shrink_flags: torch's SHRINK_ABORT: first end what this rank waits for in the group.

        Raises:
            NotImplementedError: a torch before 2.15, or an MPI without ULFM.
            DistBackendError: the other ranks did not come in time, or more ranks have died than were excluded.
        """
        runtime.refuse_in_forked_child("shrink")
        if not self.supports_shrinking:
            raise NotImplementedError("shrink_group on mpiplus needs torch 2.15 and an MPI with ULFM (docs/usage.md)")
        if shrink_flags & _SHRINK_ABORT:
            self.abort()
        stay = [rank for rank in range(self._size) if rank not in ranks_to_exclude]
        base, dead = self._communicator.base, failures.failed_ranks(self._communicator.comm, listen=True)
        if {*dead} - {*ranks_to_exclude}:
            raise DistBackendError(f"shrink: ranks {dead} of {self.label} have died; exclude all of them")
        if dead:
            base = failures.without_the_dead(self._communicator.comm, self.timeout)
        self._splits += 1
        name = f"{self._name} shrunk {self._splits}"
        store = dist.PrefixStore(f"{name}/", self._store)
        made = self._make_part(base, store, stay, name, self.timeout)
        if world.is_current(self):
            world.adopt(made)
        assert self.as_backend is not None
        return self.as_backend(made)
