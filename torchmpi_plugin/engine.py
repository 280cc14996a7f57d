"""The Python face of the C engine: its lifetime, who waits, and what happens when an operation completes.

The C engine starts operations, advances them and knows no Python. Here a pending operation is tied to its
:class:`~torchmpi_plugin.work.PendingWork`, which keeps its tensors alive: ``_registry`` holds every one
that MPI or a neighbour may still be writing to, whether or not the user kept it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import mpi_runtime, status

if TYPE_CHECKING:
    from .work import PendingWork

PENDING, DONE, FAILED, ABORTED = 0, 1, 2, 3
_REPORTED = 4  # added to the state where the background thread completes the operation too
#: How long C polls before Python looks at signals and deadlines again.
SLICE_NS = 50_000_000
_HOUSEKEEPING_NS = 250_000_000

#: True in a process forked from one that had the engine running: MPI must not be touched there.
forked = False


class Engine:
    """One per process, made with the first group."""

    def __init__(self) -> None:
        mpi = mpi_runtime.mpi()
        self.lib, self.ffi = mpi_runtime.shim()
        level = mpi.Query_thread()
        mpi_runtime.warn_of_thread_level(level)
        self.background = mpi_runtime.progress_allowed(mpi)
        #: The only thread that may call MPI, where MPI wants that.
        self.only_thread = None if self.background else threading.main_thread().ident
        self._registry: dict[int, PendingWork] = {}
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._stopping = False

    # ---- pending operations ----

    def watch(self, work: PendingWork) -> None:
        """Keep ``work`` alive until it is complete, and complete it in the background."""
        self._registry[work.handle] = work
        if not self.background:
            self._reap()
            return
        if self._thread is None:
            self._start_background()
        if not self.lib.mpp_watch(work.handle):
            self._finish(work, self.lib.mpp_state_of(work.handle))

    def _finish(self, work: PendingWork, state: int) -> None:
        """C is done with ``work``: complete it, and forget it unless the background thread will."""
        work.complete(state & ~_REPORTED)
        if not state & _REPORTED:
            self._registry.pop(work.handle, None)

    def _reap(self) -> None:
        """Without a thread of our own, every call completes what has become complete."""
        for work in list(self._registry.values()):
            self._try(work)

    def _try(self, work: PendingWork) -> None:
        state = self.lib.mpp_state_of(work.handle)
        if state != PENDING:
            self._finish(work, state)

    def poll(self, work: PendingWork) -> bool:
        """Whether ``work`` is complete, after a try to make it so."""
        if not work.finished:
            self._try(work)
        return work.finished

    def wait(self, work: PendingWork, until: float | None) -> bool:
        """Wait for ``work``; False once ``until`` (time.monotonic) has passed. Deadlines of its own fail it.

        Ctrl-C and other signals are handled every 50 ms, between two slices of polling in C.
        """
        lib, handle = self.lib, work.handle
        try:
            while not work.finished:
                state = lib.mpp_wait(handle, SLICE_NS if until is None else self._slice(until))
                if state == ABORTED:
                    work.abandon_aborted()
                elif state != PENDING:
                    self._finish(work, state)
                else:
                    status.waits(work)
                    work.check_deadline()
                    if until is not None and not work.finished and time.monotonic() >= until:
                        return False
            return True
        finally:
            status.waits(None)
            if not work.finished or work.abandoned:
                self.watch(work)

    @staticmethod
    def _slice(until: float) -> int:
        return max(0, min(SLICE_NS, int((until - time.monotonic()) * 1e9)))

    def pending(self) -> list[PendingWork]:
        """Operations whose buffers are still in use."""
        return [work for work in list(self._registry.values()) if self.lib.mpp_state_of(work.handle) == PENDING]

    # ---- background ----

    def _start_background(self) -> None:
        with self._start_lock:
            if self._thread is not None or self._stopping:
                return
            if self.lib.mpp_engine_start(1):
                raise RuntimeError("mpiplus could not start its progress thread (too many threads?)")
            self._thread = threading.Thread(target=self._complete_forever, name="mpiplus", daemon=True)
            self._thread.start()

    def _complete_forever(self) -> None:
        """Completes asynchronous operations: results put in place, futures set, references dropped."""
        housekeeping = time.monotonic()
        while not self._stopping:
            handle = self.lib.mpp_next_completed(_HOUSEKEEPING_NS if self._registry else 1_000_000_000)
            work = self._registry.pop(handle, None) if handle else None
            if work is not None:
                work.complete(self.lib.mpp_state_of(handle) & ~_REPORTED)
            del work  # or the last tensor would live until the next one completes
            if time.monotonic() - housekeeping > _HOUSEKEEPING_NS / 1e9:
                housekeeping = time.monotonic()
                self._check_deadlines()

    def _check_deadlines(self) -> None:
        # A function of its own: a variable of the loop above would keep the last operation's tensors alive.
        for work in list(self._registry.values()):
            if not work.finished:
                work.check_deadline()

    def stop(self) -> None:
        """End both threads; nothing progresses in the background any more."""
        self._stopping = True
        self.lib.mpp_engine_stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)


_engine: Engine | None = None
_lock = threading.Lock()


def start() -> Engine:
    """The engine, started if need be."""
    global _engine  # noqa: PLW0603
    with _lock:
        if _engine is None:
            _engine = Engine()
            from . import shutdown

            shutdown.install(_engine)
        return _engine


def running() -> Engine | None:
    """The engine, if there is one."""
    return None if forked else _engine


def _after_fork_in_child() -> None:
    global forked  # noqa: PLW0603
    forked = _engine is not None


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def set_chunk_limit(limit: int) -> Iterator[None]:
    """Test hook: operations longer than ``limit`` bytes are cut up, as they are above 1 GiB.

    Args:
        limit: bytes, a positive multiple of 64; the same on all ranks, and no operation may be under way.
    """
    if limit <= 0 or limit % 64:
        raise ValueError(f"the chunk limit must be a positive multiple of 64 bytes, not {limit}")
    lib = mpi_runtime.shim().lib
    previous = lib.mpp_get_chunk_limit()
    lib.mpp_set_chunk_limit(limit)
    try:
        yield
    finally:
        lib.mpp_set_chunk_limit(previous)


def mpi_error_text(code: int) -> str:
    """MPI's own words for an error code."""
    lib, ffi = mpi_runtime.shim()
    text: Any = ffi.new("char[]", 1024)
    lib.mpp_error_text(code, text, 1024)
    return str(ffi.string(text).decode(errors="replace"))
