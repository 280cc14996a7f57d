"""Steps that all ranks of a communicator take together: what fails on one is raised on all, and none waits for ever."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import DistBackendError
from ..mpi import nonblocking, runtime
from ..names import describe_ranks
from ..store.checkin import CheckIn

T = TypeVar("T")

_LOOK_EVERY = 1.0
_LATE_SECONDS = 1.0  # for the other ranks that wait to say so
_LONG = 40_000  # bytes: MPICH copies messages of more than 16 KiB out of the sender's memory
_CURE = (
    ": it may not read the memory of the node's other processes, and does not tell. Start them in one container, or, "
    "with MPICH, set MPIR_CVAR_CH4_CMA_ENABLE=0; see 'Small /dev/shm in containers' in docs/sharp-bits.md"
)


class Steps:
    """Steps of the ranks while a group is made.

    Args:
        checkin: of these ranks; tells at the deadline who did not come.
        timeout: for all steps together.
        doing: what the user is waiting for, for the error messages.
        comm: a communicator of theirs on which nothing else is under way; None if the first step makes it.

    Attributes:
        broken: the ranks have lost each other, and the communicator is of no use any more.
    """

    def __init__(self, checkin: CheckIn, timeout: timedelta, doing: str, comm: Any = None) -> None:
        self.comm = comm
        self._checkin = checkin
        self._doing = doing
        self._seconds = timeout.total_seconds()
        self._until = time.monotonic() + self._seconds
        self.broken = False

    def make(self, call: Callable[[], Any]) -> Any:
        """The communicator for the other steps, from a call of MPI that all ranks make, and that has no deadline.

        Raises:
            DistBackendError: not all ranks have made it in time.
        """
        try:
            self.comm = runtime.within(max(0.0, self._until - time.monotonic()), call, self._look)
        except TimeoutError:
            self.broken = True
            raise DistBackendError(self._too_late()) from None
        return self.comm

    def meet(self, comm: Any) -> Any:
        """The same where there is one already, once all ranks have come."""
        self.comm = comm
        self.take(lambda: None)
        return comm

    def take(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank.

        A rank on which it fails comes to the exchange of the results all the same: the others would wait for it there.

        Returns:
            What it returned, by rank, on every rank.

        Raises:
            DistBackendError: it raised an exception on some rank, or not all ranks have come in time.
        """
        failure: Exception | None = None
        try:
            mine = pickle.dumps((True, action()))
        except Exception as error:
            failure = error
            mine = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        results = [pickle.loads(data) for data in self._all_gather(mine)]
        failed = [rank for rank, (succeeded, _) in enumerate(results) if not succeeded]
        if failed:
            raise DistBackendError(f"{self._doing} failed on {describe_ranks(failed)}: {results[failed[0]][1]}") from (
                failure
            )
        return [result for _, result in results]

    def try_mpi(self) -> None:
        """Compare what MPI's own collectives bring with what was sent.

        Where MPICH 5.0 may not read the memory of the other processes of a node, as in containers of their own, only
        its messages fail: its collectives report success, and leave what was in the buffer.

        Raises:
            DistBackendError: it is something else, on some rank.
        """
        sent = [bytes([1 + rank % 255]) * _LONG for rank in range(self.comm.Get_size())]
        brought = self._all_gather(sent[self.comm.Get_rank()])

        def compare() -> None:
            if wrong := [rank for rank, data in enumerate(brought) if data != sent[rank]]:
                raise DistBackendError(
                    f"MPI's own collective brought other bytes than {describe_ranks(wrong)} sent{_CURE}"
                )

        self.take(compare)

    def _all_gather(self, mine: bytes) -> list[bytes]:
        look_at = time.monotonic() + _LOOK_EVERY

        def check() -> None:
            nonlocal look_at
            if time.monotonic() > self._until:
                raise DistBackendError(self._too_late())
            if time.monotonic() > look_at:
                if (gone := self._look()) is not None:
                    raise gone
                look_at = time.monotonic() + _LOOK_EVERY

        try:
            return nonblocking.all_gather(self.comm, mine, check)
        except runtime.mpi().Exception as error:
            self.broken = True
            raise DistBackendError(f"{self._doing}: {error}") from error
        except BaseException:
            self.broken = True
            raise

    def _look(self) -> DistBackendError | None:
        return self._checkin.gone(self._doing)

    def _too_late(self) -> str:
        """Those who give up say so in the store, so who does not is the one they waited for."""
        rank, size = self._checkin.rank, self._checkin.size
        self._checkin.briefly(lambda: self._checkin.arrive("late", ""), None)
        time.sleep(_LATE_SECONDS)
        nobody: list[int] = []
        absent = self._checkin.briefly(lambda: self._checkin.missing("late"), nobody)
        who = describe_ranks(absent) if absent else "some ranks"
        return (
            f"{self._doing}: rank {rank} of {size} gave up after {self._seconds:g} s: {who} began this too, and "
            f"stopped half-way. Either the process was stopped, or its node cannot be reached."
        )
