"""Presence of ranks, over torch's store: for the moments when MPI cannot be asked with a deadline."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch.distributed import Store

from ..errors import DistBackendError
from ..mpi import runtime
from ..names import describe_ranks

T = TypeVar("T")

#: In place of a rank in a key: what rank 0 says of all.
_ALL = "all"
#: Seconds until the first look at whether the others still live, and between two; torch's store writes a warning about
#: each wait that ends without its key, so as rarely as torch itself looks there.
_FIRST_LOOK, _LOOK_EVERY = 3.0, 10.0

#: Whether somebody will never come, whom who does this waits for: the error, or None.
Look = Callable[[str], DistBackendError | None]


# ---- threads in store calls ----

# One that comes out of torch's C++ while Python ends is ended there, which C++ answers with abort().
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon that may call the store."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


def wait_for_threads(seconds: float) -> bool:
    """Before Python ends: whether all of them have ended by then."""
    until = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in _threads)


class Report(NamedTuple):
    """The last collective that a rank called, or waits in."""

    number: int  # in the group
    call: str  # in words
    essence: str  # what must be equal on all ranks


class CheckIn:
    """One group's corner of the store.

    Args:
        store: the group's own prefix of torch's store.
        name: unique in the store over the life of the job, equal on all ranks.
        look: what whoever waits for the others asks now and then; None where nothing is known of them.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, look: Look | None = None) -> None:
        self.store = store
        self.name = name
        self.rank = rank
        self.size = size
        self._look = look
        self._barriers = 0
        self.mismatch = ""  # the name of the last exchange of ranks whose calls differed
        self._asking: threading.Thread | None = None

    def connected_anew(self) -> CheckIn:
        """The same on a connection of its own, where the store has more: on a shared one a call waits for all others.

        To keep it keeps no server alive, whose port may be wanted again.
        """
        other = copy.copy(self)
        if hasattr(self.store, "clone"):
            with contextlib.suppress(OSError):
                for end in socket.socketpair():  # where no more files may be open torch tries until its timeout
                    end.close()
                other.store = self.store.clone()
        return other

    def _key(self, *parts: object) -> str:
        return "/".join(("mpiplus", self.name, *map(str, parts)))

    def _present(self, what: str, ranks: list[int]) -> list[int]:
        with contextlib.suppress(RuntimeError):
            return [r for r in ranks if self.store.check([self._key(what, r)])]
        return []

    def missing(self, what: str) -> list[int]:
        """The ranks that have not checked in for ``what``."""
        present = self._present(what, [*range(self.size)])
        return [r for r in range(self.size) if r not in present]

    def arrive(self, what: str, value: str) -> None:
        self.store.set(self._key(what, self.rank), value)

    def gone(self, doing: str) -> DistBackendError | None:
        """The error of whoever waits for the others, if somebody is known to have ended."""
        return self._look(doing) if self._look is not None else None

    def gather(self, what: str, value: str, timeout: timedelta, doing: str) -> list[str]:
        """Every rank's value, on every rank.

        Rank 0 reads them and says them to all: were each rank to read each value, the store would have to look up as
        many keys as the square of the ranks. All hear the same, or nothing: once rank 0 has given up, who comes finds
        nobody.

        Raises:
            DistBackendError: some ranks did not come, or will not; the message names them.
        """
        if self.size == 1:
            return [value]
        start = time.monotonic()
        until = start + timeout.total_seconds()
        try:
            self.arrive(what, value)
            if self.rank == 0:
                keys = [self._key(what, r) for r in range(self.size)]
                self._wait(keys, until, doing)
                values = [item.decode() for item in self._read(keys)]
                self.store.set(self._key(what, _ALL), json.dumps(values))
                return values
            self._wait([self._key(what, _ALL)], until, doing)
            return self._list_with(value, what, until)
        except DistBackendError:
            raise
        except RuntimeError as error:  # DistStoreError and its relatives
            raise self._timed_out(what, doing, time.monotonic() - start, error) from error

    def _wait(self, keys: list[str], until: float, doing: str) -> None:
        """The store's wait in parts: one who has died meanwhile would be waited for to the deadline."""
        length = _FIRST_LOOK if self._look is not None else float("inf")
        while True:
            begun = time.monotonic()
            seconds = max(0.01, min(length, until - begun))  # under a millisecond is for ever
            try:
                with runtime.progressing():
                    return self.store.wait(keys, timedelta(seconds=seconds))
            except RuntimeError:
                now = time.monotonic()
                if now >= until or now - begun < 0.9 * seconds:  # it is not the time that was up
                    raise
            gone = self.gone(doing)
            if gone is not None and not self.store.check(keys):  # it may have come, and ended
                raise gone
            length = _LOOK_EVERY

    def _list_with(self, value: str, what: str, until: float) -> list[str]:
        """Return what rank 0 has said now, not in an earlier exchange of this name that the store may still know."""
        while True:
            values: list[str] = json.loads(self.store.get(self._key(what, _ALL)))
            if values[self.rank : self.rank + 1] == [value]:
                return values
            if time.monotonic() >= until:
                raise RuntimeError("rank 0 says what another group once heard")
            time.sleep(0.01)

    def barrier(self, timeout: timedelta, doing: str) -> None:
        """Wait until all ranks have come; a DistBackendError names those who did not."""
        self._barriers += 1
        self.gather(f"barrier/{self._barriers}", "", timeout, doing)
        # Everybody is past the one before: coming to this one took it.
        self.forget(f"barrier/{self._barriers - 1}" if self._barriers > 1 else "")

    def forget(self, what: str) -> None:
        """Delete what this rank has said in an exchange that everybody has left; of none, nothing. All ranks do so."""
        for part in ([self.rank, _ALL] if self.rank == 0 else [self.rank]) if what else []:
            with contextlib.suppress(RuntimeError):
                self.store.delete_key(self._key(what, part))

    def _read(self, keys: list[str]) -> list[bytes]:
        if self.store.has_extended_api():  # type: ignore[attr-defined]
            return list(self.store.multi_get(keys))
        return [self.store.get(key) for key in keys]  # file:// knows no multi_get

    def _timed_out(self, what: str, doing: str, elapsed: float, error: Exception) -> DistBackendError:
        absent = self.missing(what)
        if not absent:
            reason = "all have come by now, but rank 0 gave up before. Some rank is late, or makes fewer such calls"
        elif len(absent) < self.size:
            reason = f"{describe_ranks(absent)} did not come. Either they failed earlier, or they do not make this call"
        else:
            reason = (
                f"the store failed ({str(error).splitlines()[0]}): rank 0 of the world, which holds it, may have ended"
            )
        return DistBackendError(f"{doing}: rank {self.rank} of {self.size} gave up after {elapsed:.1f} s: {reason}.")

    # ---- what the others are doing ----
    # Asked while something is late, perhaps because the rank that holds the store is stopped or cut off: then a
    # store call may block for as long as the store's timeout, so each runs on a thread of its own and is
    # given up after a moment.

    def briefly(self, ask: Callable[[], T], default: T, seconds: float = 1.0) -> T:
        """Ask the store; ``default`` if it does not answer in time, or still owes the answer before."""
        if self._asking is not None and self._asking.is_alive():
            return default
        answer = [default]

        def run() -> None:
            with contextlib.suppress(Exception):  # the thread would end with a traceback
                answer[0] = ask()

        try:
            self._asking = start_thread(run, "mpiplus-store")
        except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread once the program has ended
            run()
        else:
            self._asking.join(seconds)
        return answer[0]

    def say(self, subject: str, what: Any) -> None:
        self.store.set(self._key(subject, self.rank), json.dumps(what))

    def heard(self, subject: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """What each of ``ranks``, of all, has said, as far as it has."""
        ranks = self._present(subject, [*(range(self.size) if ranks is None else ranks)])
        return {rank: json.loads(self.store.get(self._key(subject, rank))) for rank in ranks}

    def report(self, report: Report) -> None:
        """Tell the others in which collective this rank has long been waiting."""
        self.briefly(lambda: self.say("waiting", report), None)

    def reports(self) -> dict[int, Report] | None:
        """Return what the ranks that wait, or waited long, said last; None if the store does not answer."""
        if self._asking is not None:
            self._asking.join(2)  # on a busy machine an answer may be just late
        return self.briefly(lambda: {rank: Report(*what) for rank, what in self.heard("waiting").items()}, None, 2)

    def leave(self, sequence: int) -> None:
        """Tell the others that this rank's program ends after collective number ``sequence``."""

        def say() -> None:
            self.say("left", sequence)
            self.store.add(self._key("left"), 1)

        self.briefly(say, None)

    def wait_for_departures(self, seconds: float) -> None:
        """Wait until all ranks have said that they leave, for so many seconds at most.

        Rank 0 does so before it drops the world's store. The store's server ends with that, and a rank that says so
        later would print torch's C++ backtraces.
        """
        until = time.monotonic() + seconds
        while self.briefly(lambda: self.store.add(self._key("left"), 0), self.size) < self.size:
            if time.monotonic() >= until:
                return
            time.sleep(0.005)

    def departed(self) -> dict[int, int]:
        """The ranks whose programs have ended, with the number of their last collective."""
        return self.briefly(lambda: self.heard("left") if self.store.add(self._key("left"), 0) else {}, {})
