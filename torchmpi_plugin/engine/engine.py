"""The Python side of the C engine: its lifetime, who waits, and what happens when an operation completes.

The C engine starts operations, advances them and knows no Python. Here a pending operation is tied to its
:class:`~torchmpi_plugin.engine.work.PendingWork`, which keeps its tensors alive: ``_registry`` holds every one
that MPI or a neighbour may still be writing to, whether or not the user kept it.

An exception may come at any instruction: Ctrl-C, another signal's. So it is C that starts an operation, makes its Work
and enters that in the registry (c_src/python/bridge.c), with no instruction in between.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from .. import _bridge, forks
from ..mpi import runtime
from ..names import log

PENDING, DONE, FAILED, ABORTED = _bridge.PENDING, _bridge.DONE, _bridge.FAILED, _bridge.ABORTED
_REPORTED = _bridge.REPORTED  # added to the state where the background thread completes the operation too
#: What is left to do after PendingWork.complete(): resolve the future; watch the second operation, just begun.
NOTHING, RESOLVE, FOLLOW = 0, 1, 2
#: How long C polls before Python looks at signals and deadlines again.
SLICE_NS = _bridge.SLICE_NS
_HOUSEKEEPING_NS = 250_000_000
ONE_THREAD = (
    "MPI was initialised with a thread level that allows calls from the main thread only; initialise it with "
    "MPI_THREAD_MULTIPLE"
)


class Pending(Protocol):
    """A Work, which knows the engine, as the engine and whoever reports on it need it: ``PendingWork``."""

    handle: int
    caller: int
    finished: bool
    abandoned: bool
    call: Any
    group: Any

    def elapsed(self) -> float: ...
    def complete(self, handle: int, state: int) -> int: ...
    def resolve(self) -> None: ...
    def check_deadline(self) -> None: ...
    def abandon_aborted(self) -> None: ...
    def is_success(self) -> bool: ...
    def exception(self) -> Exception | None: ...


#: By thread: what it has waited for for a while.
waiting: dict[int, Pending] = {}


def is_waited_for(group: Any) -> bool:
    """Return whether a thread has waited for an operation of ``group`` for a while."""
    return any(work.group is group for work in list(waiting.values()))


class Engine:
    """One per process, made with the first group."""

    def __init__(self) -> None:
        mpi = runtime.mpi()
        self.lib, self.ffi = runtime.shim()
        level = mpi.Query_thread()
        runtime.warn_of_thread_level(level)
        self.background = runtime.progress_allowed(mpi)
        #: The only thread that may call MPI, where MPI wants that.
        self.only_thread = None if self.background else threading.main_thread().ident
        self._registry: dict[int, Pending] = {}
        self._threads: set[threading.Thread] = set()
        #: How many of them are in the users' callbacks, or may be.
        self._resolving = 0
        #: What C has reported of complete operations, of how many, and how many of these have been seen to.
        most = self.lib.MPP_MOST_REPORTS
        self._handles, self._states = self.ffi.new("uintptr_t[]", most), self.ffi.new("int[]", most)
        self._reported = self._seen_to = 0
        self._kept_house = time.monotonic()
        self._start_lock, self._lead, self._housekeeping = threading.Lock(), threading.Lock(), threading.Lock()
        self._stopping = False

    def check_thread(self, doing: str) -> None:
        """Below ``MPI_THREAD_SERIALIZED``, a RuntimeError for what leads to MPI calls on a thread that is not MPI's."""
        if self.only_thread is not None and self.only_thread != threading.get_ident():
            raise RuntimeError(f"{doing}: {ONE_THREAD}")

    # ---- pending operations ----

    def own(self, work: Pending) -> None:
        """Keep ``work`` alive until its C operation is complete, whatever becomes of the call that made it."""
        self._registry[work.handle] = work
        self.lib.mpp_unclaimed()

    def watch(self, work: Pending) -> None:
        """Complete ``work``, which is owned, in the background."""
        handle = work.handle
        if not self.background:
            for pending in list(self._registry.values()):  # every call completes what has become complete
                self._try(pending)
            return
        self.poll_in_background()
        if not self.lib.mpp_notify_on_completion(handle, 1) and self._finish(
            work, handle, self.lib.mpp_state_of(handle)
        ):
            self.watch(work)

    def _finish(self, work: Pending, handle: int, state: int) -> bool:
        """C is done with ``handle``: complete ``work``, and forget it unless the background thread will.

        Returns:
            Whether this call has begun the second operation, and the caller is to wait for it or watch it.
        """
        left = work.complete(handle, state & ~_REPORTED)
        if left == RESOLVE:
            work.resolve()
        if not state & _REPORTED:
            self._registry.pop(handle, None)
        return left == FOLLOW

    def _try(self, work: Pending) -> None:
        handle = work.handle
        state = self.lib.mpp_state_of(handle)
        if state != PENDING and self._finish(work, handle, state):
            self.watch(work)

    def poll(self, work: Pending) -> bool:
        """Return whether ``work`` is complete, after a try to make it so where this thread may."""
        if not work.finished and self.only_thread in (None, threading.get_ident()):
            self._try(work)
        return work.finished

    def wait(self, work: Pending, until: float | None) -> bool:
        """Wait for ``work``; False once ``until`` (time.monotonic) has passed. Deadlines of its own fail it.

        Ctrl-C and other signals are handled every 50 ms, between two slices of polling in C.
        """
        if self.only_thread is not None:  # its words take longer than many a wait
            self.check_thread(f"waiting for {work}")
        lib = self.lib
        try:
            while not work.finished:
                handle = work.handle
                left = SLICE_NS if until is None else int((until - time.monotonic()) * 1e9)
                state = lib.mpp_wait(handle, max(0, min(SLICE_NS, left)))
                if state == ABORTED:
                    work.abandon_aborted()
                elif state != PENDING:
                    self._finish(work, handle, state)
                else:
                    waiting[threading.get_ident()] = work
                    work.check_deadline()
                    if until is not None and not work.finished and time.monotonic() >= until:
                        return False
            return True
        finally:
            work.caller = 0
            if waiting:
                waiting.pop(threading.get_ident(), None)
            if not work.finished or work.abandoned:
                self.watch(work)

    def pending(self) -> list[Pending]:
        """Operations whose buffers are still in use, but for those that a thread is in the call of."""
        works = [work for work in list(self._registry.values()) if not work.caller]
        return [work for work in works if self.lib.mpp_state_of(work.handle) == PENDING]

    def unseen(self) -> list[Pending]:
        """Pending ones whose failure nobody would hear of: no thread waits, and their group has not failed before."""
        works = [work for work in self.pending() if not (work.abandoned or work.group._calls.broken)]
        return [work for work in works if work not in list(waiting.values())]

    # ---- background ----

    def poll_in_background(self) -> None:
        """Start the threads, if that is allowed and they do not run yet."""
        if self._threads or not self.background:
            return
        with self._start_lock:
            if self._threads or self._stopping:
                return
            if self.lib.mpp_engine_start():
                raise RuntimeError("mpiplus could not start its progress thread (too many threads?)")
            self._start_completing()
            _bridge.set_watched(True)

    def _start_completing(self) -> None:
        thread = threading.Thread(target=self._complete_forever, name="mpiplus", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _complete_forever(self) -> None:
        """Completes asynchronous operations: results put in place, futures set, references dropped.

        Setting a future runs the callbacks of whoever uses it, and such a callback may wait for another future
        (PowerSGD's does). So the thread that sets one leaves the lead to another.
        """
        self._threads.add(threading.current_thread())  # also where an exception keeps who started it from doing so
        while True:
            try:
                with self._lead:
                    resolving = self._lead_until_a_future()
            except MemoryError:
                log.exception("mpiplus: no memory to complete an operation with; going on")
                continue
            if resolving is None:
                return
            with self._start_lock:
                self._resolving += 1
                if self._resolving == len(self._threads) and not self._stopping:
                    self._start_completing()
            resolving()
            del resolving
            with self._start_lock:
                self._resolving -= 1

    def _next_report(self) -> tuple[int, int]:
        """An operation that is complete, and its state; 0: none is."""
        if self._seen_to == self._reported:
            ns = _HOUSEKEEPING_NS if self._registry else 1_000_000_000
            self._reported = self.lib.mpp_next_completed(self._handles, self._states, self.lib.MPP_MOST_REPORTS, ns)
            self._seen_to = 0
            if not self._reported:
                return 0, PENDING
        report = self._handles[self._seen_to], self._states[self._seen_to]
        self._seen_to += 1
        return report

    def _lead_until_a_future(self) -> Callable[[], None] | None:
        """Complete operations until the next step may run callbacks; that step, or None at the end."""
        while True:
            handle, state = self._next_report()
            if self._stopping and not handle:
                return None
            work = self._registry.pop(handle, None)
            if work is not None:
                left = work.complete(handle, state)
                if left != NOTHING:
                    return work.resolve if left == RESOLVE else functools.partial(self.watch, work)
            del work  # or the last tensor would live until the next one completes
            if self._registry and time.monotonic() - self._kept_house > _HOUSEKEEPING_NS / 1e9:
                self._kept_house = time.monotonic()
                return self._keep_house

    def _keep_house(self) -> None:
        """Look at deadlines: one thread at a time, for it may take seconds to ask the others."""
        if not self._housekeeping.acquire(blocking=False):
            return
        try:
            for late in list(self._registry.values()):
                # C may be done with one that an interrupted wait left behind.
                if not self.poll(late):
                    late.check_deadline()
        finally:
            self._housekeeping.release()

    def stop(self) -> None:
        """End all threads; nothing progresses in the background any more."""
        self._stopping = True
        _bridge.set_watched(False)
        self.lib.mpp_engine_stop()
        until = time.monotonic() + 5
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


_engine: Engine | None = None
_lock = threading.Lock()


def start() -> Engine:
    """The engine, started if need be; a RuntimeError in a forked child, which may step nothing of its parent's."""
    global _engine  # noqa: PLW0603
    if forks.forked:
        runtime.refuse_in_forked_child("an operation of mpiplus")
    if _engine is not None:
        return _engine
    with _lock:
        if _engine is None:
            _engine = Engine()
        return _engine


def running() -> Engine | None:
    return None if forks.forked else _engine


#: For operations that are pending at an end, the program's, a group's or a window's: set by ``MPIPLUS_EXIT_GRACE`` when
#: a world is made.
grace_seconds = 0.0


def wait_within_grace(true: Callable[[], bool]) -> None:
    """Wait until it is so, or that time is over."""
    until = time.monotonic() + grace_seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.001)


def status_request() -> tuple[int, str]:
    """Return what the thread in C was asked and Python is to answer, after the question's number; empty: nothing."""
    lib, ffi = runtime.shim()
    request = ffi.new("char[]", lib.MPP_REQUEST)
    number = int(lib.mpp_status_wanted(request))
    return number, str(ffi.string(request).decode(errors="replace")).strip()


def give_status(number: int, text: str) -> None:
    """The answer to :func:`status_request`: to that question, and none that was asked since."""
    lib, _ = runtime.shim()
    lib.mpp_status_give(number, text.encode(errors="replace"))
