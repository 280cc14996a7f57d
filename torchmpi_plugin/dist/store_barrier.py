"""Ranks that wait for each other over the group's store: asleep between looks, for hours if need be.

A collective would not do: it has the group's deadline, and its wait may burn a core.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import DistBackendError
from ..names import describe_ranks
from .members import Members, find

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 5.0
#: How long a rank that may go on can take to notice, beside its pause: the machine may be busy.
_SCHEDULING = 1.0
#: Looks per second that the store takes from all ranks together, and from each one.
_LOOKS, _LOOKS_EACH = 1000.0, 20.0

#: The key that lets the ranks go on; its value is an error, or nothing.
_OPEN = "door"

_numbers: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()


class StoreBarrier:
    """One wait for each other of all ranks, or of ``size``, all of which make those of one name in the same order."""

    def __init__(self, members: Members, name: str, size: int | None = None) -> None:
        numbers = _numbers.setdefault(members.group, {})
        numbers[name] = number = numbers.get(name, 0) + 1
        self._members = members
        self._store = dist.PrefixStore(f"mpiplus-dist/{name}/{number}", members.group.get_group_store())
        self._size = members.size if size is None else size
        self._longest_pause = min(max(1 / _LOOKS_EACH, members.size / _LOOKS), _LONGEST_PAUSE)

    def arrive(self) -> None:
        """This rank has come; the last one lets all go on."""
        self._store.set(f"came/{self._members.rank}", "")
        if self._store.add("count", 1) == self._size:
            self._store.set(_OPEN, "")

    def fail(self, error: str) -> None:
        """Let all go on, with an error instead; whoever comes later gets it too."""
        self._store.set(_OPEN, error)
        self.leave()
        time.sleep(2 * self._longest_pause)  # for those who wait: this process may end next, and the job with it

    def wait(self, doing: str, seconds: float = float("inf")) -> bytes:
        """Sleep until all have come, and leave; return the error, or nothing. By default it has no deadline.

        Raises:
            DistBackendError: time is up (the message names the missing ranks), or the store is gone.
        """
        start = time.monotonic()
        while not self._has(_OPEN, doing):
            waited = time.monotonic() - start
            if waited >= seconds:
                self._give_up(doing, waited)
            self._pause(waited, seconds - waited)
        error = self._store.get(_OPEN)
        self.leave()
        if not error:
            self.see_off(2 * self._longest_pause + _SCHEDULING)
        return error

    def leave(self) -> None:
        """The last one to leave takes the keys away."""
        if self._store.add("left", 1) == self._size:
            for key in (*(f"came/{rank}" for rank in self._members.ranks), "count", _OPEN, "left"):
                with contextlib.suppress(RuntimeError):
                    self._store.delete_key(key)

    def see_off(self, seconds: float = float("inf")) -> None:
        """On rank 0, sleep until all have left: its process holds the store as a rule, and may end next."""
        start, waited = time.monotonic(), 0.0
        with contextlib.suppress(DistBackendError):
            while self._members.rank == 0 and waited < seconds and self._has("left", ""):
                self._pause(waited, seconds - waited)
                waited = time.monotonic() - start

    def _pause(self, waited: float, left: float) -> None:
        time.sleep(max(_SHORTEST_PAUSE, min(waited / 10, self._longest_pause, left)))

    def _has(self, key: str, doing: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError as error:
            raise DistBackendError(
                f"{doing}: rank {self._members.rank} lost the store while it waited: {str(error).splitlines()[0]}; its "
                f"process, rank 0's as a rule, may have ended"
            ) from error

    def _give_up(self, doing: str, waited: float) -> None:
        """Unless all have come at the last moment: they go on any moment then."""
        missing = [rank for rank in self._members.ranks if not self._store.check([f"came/{rank}"])]
        if not missing:
            return
        self.leave()
        raise DistBackendError(
            f"{doing}: rank {self._members.rank} gave up after {waited:.1f} s: {describe_ranks(missing)} did not come"
        )


def barrier(group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None) -> None:
    """Wait until every rank has come. Does nothing alone. From Composer and Axolotl.

    Args:
        group: the ranks that meet; the world if None.
        timeout: seconds, or a timedelta. The ranks then meet over the group's store, whatever the backend. If
            None it is torch's barrier, with the group's deadline.

    Raises:
        DistBackendError: time is up; the message names the ranks that did not come, by their global ranks.

    Example::

        barrier(timeout=60)
    """
    members = find(group, "barrier")
    if members.size == 1:
        return
    if timeout is None:
        dist.barrier(group=members.group)
        return
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    waiting = StoreBarrier(members, "barrier")
    waiting.arrive()
    waiting.wait("barrier", seconds)
