"""Ranks that wait for each other over the group's store: asleep between looks, for hours if need be.

A collective would not do: it has the group's deadline, and its wait may burn a core.
"""

from __future__ import annotations

import contextlib
import time
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import DistBackendError, describe_ranks
from .members import Members

_SHORTEST_NAP, _LONGEST_NAP = 0.001, 5.0
#: Looks per second that the store's host takes from all ranks together, and from each one.
_LOOKS, _LOOKS_EACH = 1000.0, 20.0

_numbers: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()


class Meeting:
    """One gathering of ranks. All of them make the same meetings of one name in the same order.

    Args:
        members: the group.
        name: what the meeting is for.
        size: how many of the group's ranks meet here; all if None.
    """

    def __init__(self, members: Members, name: str, size: int | None = None) -> None:
        numbers = _numbers.setdefault(members.group, {})
        numbers[name] = number = numbers.get(name, 0) + 1
        self._members = members
        self._store = dist.PrefixStore(f"mpiplus-dist/{name}/{number}", members.group.get_group_store())
        self._size = members.size if size is None else size
        self._longest_nap = min(max(1 / _LOOKS_EACH, members.size / _LOOKS), _LONGEST_NAP)

    def arrive(self) -> None:
        """This rank has come; the last one opens the door."""
        self._store.set(f"came/{self._members.rank}", "")
        if self._store.add("count", 1) == self._size:
            self._store.set("door", "")

    def fail(self, error: str) -> None:
        """Open the door with bad news instead; whoever comes later hears it too."""
        self._store.set("door", error)
        self.leave()

    def wait(self, doing: str, seconds: float | None = None) -> bytes:
        """Sleep until the door opens, and leave.

        Args:
            doing: what the ranks meet for, for messages.
            seconds: the deadline; unlimited by design if None.

        Returns:
            The bad news, or nothing.

        Raises:
            DistBackendError: time is up (the message names the missing ranks), or the store is gone.
        """
        start = time.monotonic()
        while not self._open(doing):
            waited = time.monotonic() - start
            if seconds is not None and waited >= seconds:
                raise self._timed_out(doing, waited)
            nap = min(max(_SHORTEST_NAP, waited / 10), self._longest_nap)
            time.sleep(nap if seconds is None else max(0.0, min(nap, seconds - waited)))
        news = self._store.get("door")
        self.leave()
        return news

    def leave(self) -> None:
        """The last one to leave takes the keys away."""
        if self._store.add("left", 1) == self._size:
            for key in (*(f"came/{rank}" for rank in self._members.ranks), "count", "door", "left"):
                with contextlib.suppress(RuntimeError):
                    self._store.delete_key(key)

    def _open(self, doing: str) -> bool:
        try:
            return self._store.check(["door"])
        except RuntimeError as error:
            raise DistBackendError(
                f"{doing}: rank {self._members.rank} lost the store while it waited: {str(error).splitlines()[0]}; its "
                f"host, rank 0 as a rule, may have ended"
            ) from error

    def _timed_out(self, doing: str, waited: float) -> DistBackendError:
        missing = [rank for rank in self._members.ranks if not self._store.check([f"came/{rank}"])]
        self.leave()
        return DistBackendError(
            f"{doing}: rank {self._members.rank} gave up after {waited:.1f} s: {describe_ranks(missing)} did not come"
        )
