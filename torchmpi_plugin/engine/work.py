"""Work: one operation as the user sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from .. import _bridge, forks
from ..errors import DistBackendError, attempt
from ..mpi import runtime
from ..tensors import device
from . import engine
from .futures import Future, MessageFuture, TypedFuture, is_typed


def in_words(call: _bridge.Call, how: str = "") -> str:
    """A call, of whose tensors the first is described."""
    text = f"{call.operation}{how}"
    if call.outputs:
        (shape, dtype), *others = call.outputs
        more = f" and {len(others)} more" if others else ""
        text += f" of {tuple(shape)} {str(dtype).removeprefix('torch.')}{more}"
    if call.peer is not None:
        direction = "to" if call.operation in ("send", "put", "signal") else "from"
        text += f" {direction} rank {call.peer}" if call.peer >= 0 else " from any rank"
    return f"{text} with tag {call.tag}" if call.tag else text


def _seconds(timeout: timedelta | float | None) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout or 0.0)


# Of operations that were complete at once: who asks first makes the future.
_asking = threading.RLock()


class Work(dist.Work):
    """An operation that has been started; this class itself: one that was complete at once.

    Attributes:
        handle: the C operation, 0 where it was complete at once.
        finished: results are in place, or ``exception()`` says why not.
        abandoned: failed for the user, while MPI may still use the buffers.
    """

    # Defaults in the class: making a Work is a good part of a small operation's time.
    handle = 0
    finished = True
    abandoned = False
    _tensors: list[torch.Tensor] = []  # noqa: RUF012 - never changed in place
    #: From whom a message came that was there at once.
    _source = -1
    #: In how many lists, all as long, the future has them, where these are more than one.
    _lists = 1
    #: Puts the result into the user's tensors.
    _finish: Callable[[], None] | None = None
    #: Buffers that must live until the operation is complete.
    _keep: Any = None
    _error: Exception | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None
    #: What resolves it: itself, but for one that C++ reads. None once somebody has taken it to do so.
    _promise: Future | TypedFuture | None = None
    _lock = _asking
    #: The record of the call; of one that was complete at once only where there is a timeline.
    call: Any = None
    #: A ProcessGroupMPI, which is of a layer above; none where it was complete at once.
    group: Any = None

    # ---- the c10d interface ----

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the result.

        Args:
            timeout: how long to wait for it now (a number: seconds); none or zero: to the operation's own deadline.

        Raises:
            DistBackendError: the operation failed, or the time is up. After a ``timeout`` of this call
                the operation goes on and may be waited for again.
        """
        if timeout is None and _bridge.wait_for(self):
            return True
        if not self.finished:
            seconds = _seconds(timeout)
            until = time.monotonic() + seconds if seconds > 0 else None
            self._check_process("wait()")
            if not engine.start().wait(cast(engine.Pending, self), until):
                raise DistBackendError(f"{self}: not complete after waiting {seconds:g} s; it is still pending")
        if self._error is not None:
            self.group.failed(self._error)
            raise self._error.with_traceback(None)
        return True

    def _check_process(self, doing: str) -> None:
        """A RuntimeError in a forked child: it would take what is sent to its parent, or wait for a lock for ever."""
        if forks.forked:
            runtime.refuse_in_forked_child(f"{doing} of {self}")

    def synchronize(self) -> None:
        """The same as ``wait()``: MPI is driven by the host. Then the result may be used on any stream."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return whether the operation is over, for better or worse. Becomes True without any call."""
        if self.finished:
            return True
        self._check_process("is_completed()")
        return engine.start().poll(cast(engine.Pending, self))

    def is_success(self) -> bool:
        """Return whether the operation is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return why the operation failed, if it has."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The result tensors; waits for them."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result tensors, which resolves without a wait."""
        self._check_process("get_future()")  # complete or not: the lock may have been another thread's of the parent's
        if not self.finished and engine.start().only_thread == threading.get_ident() and not self.is_completed():
            # Nobody else completes it while this thread waits in C++.
            if self.call.peer is not None:  # it may be matched by one that this rank begins later
                return MessageFuture(self)
            engine.start().wait(cast(engine.Pending, self), None)
        return self.later_future()

    def later_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The same for who does not wait for it, however long it takes."""
        with self._lock:
            if self._future is not None:
                return self._future
            if not self.finished:  # its end, which something follows from, is not to wait for the background's leisure
                engine.start().lib.mpp_wake_on_completion(self.handle)
            # With its devices, a callback's own work on them is on streams that whoever waits for its result waits for.
            devices: list[Any] = device.devices_of(self._tensors)
            if is_typed(self._tensors) and not devices and self._lists == 1:
                self._promise = TypedFuture(self._tensors)
                self._future = self._promise.future
            else:
                self._promise = self._future = made = Future(devices=devices)
                made.call, made.has_devices = self.call, bool(devices)
            future = self._future
        self.resolve()
        return future

    def source_rank(self) -> int:
        """The rank, in the group, that a message came from; -1 before it came, and of what is no message."""
        running = engine.running() if self.handle and self.finished else None
        return self._source if running is None else int(running.lib.mpp_source_of(self.handle))

    _source_rank = source_rank

    def resolve(self) -> None:
        """Set the future, if there is one and the operation is over; no matter how many threads come to do it.

        Who takes the promise sets it, and nobody else: a future cannot be set twice. Outside the lock, as this runs the
        user's callbacks.
        """
        with self._lock:
            if not self.finished:
                return
            promise, self._promise = self._promise, None
        if promise is None:
            return
        if self._error is not None:
            promise.fail(self._error)
        else:
            promise.set_result(self._tensors if self._lists == 1 else self._in_lists())

    def _in_lists(self) -> Any:
        length = len(self._tensors) // self._lists
        return [self._tensors[i * length : (i + 1) * length] for i in range(self._lists)]


class PendingWork(Work):
    """An operation that C is still busy with, or was when it started.

    C makes it, without arguments, and gives it the attributes that follow: c_src/python/bridge.c.
    """

    finished = False
    call: _bridge.Call
    #: The thread whose call made it and goes on; 0 once the operation is on its own.
    caller = 0
    #: Why it was taken back, if it was.
    if_cancelled: Exception | None = None
    #: c10d's options, which may have a timeout of the call's own.
    _opts: Any = None
    #: Begins a second C operation when the first one is complete; its handle. Called once, on any thread.
    _then: Callable[[int], int] | None = None
    # Its _lock is its own: held while results are copied and a second half begins, which may take long. Whoever holds
    # it may come again: a signal handler, or the end of some object's life, may wait for this operation.
    #: The first C operation, once it is complete and followed by the second; other threads may still look at it.
    _first_handle = 0

    @property
    def seconds(self) -> float:
        """Its deadline, from the call: the call's own, else the group's."""
        own = float(self._opts.timeout.total_seconds()) if self._opts is not None else 0.0
        return (own if own > 0 else self.call.limit) + self.call.extension

    def __del__(self) -> None:
        # Never while pending: then the engine's registry still refers to it. At Python's end a module is empty or None.
        running = engine.running() if engine and callable(engine.running) else None
        if running is not None and self.handle and self.finished and not self.abandoned:
            running.lib.mpp_release(self.handle)
            if self._first_handle:
                running.lib.mpp_release(self._first_handle)

    def __str__(self) -> str:
        return f"{in_words(self.call)} (sequence number {self.call.sequence}, {self.group.label})"

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - 1e-9 * self.call.begun

    def complete(self, handle: int, state: int) -> int:
        """C is done with ``handle``: go on with the second operation, or put the result in place. Idempotent.

        Returns:
            What the caller is to do, of engine.NOTHING, RESOLVE and FOLLOW; each is said to one caller only.
        """
        with self._lock:
            if handle != self.handle:
                return engine.NOTHING  # another thread has gone on from there
            if self.finished:
                self.abandoned = False  # C has let go of the buffers after all
                self._finish = self._keep = None
                return engine.NOTHING
            error = None
            try:
                if state != engine.DONE:
                    error = self.group.failure_of(self)
                elif self._goes_on():
                    return engine.FOLLOW
                elif self._finish is not None:
                    self._finish()
            except Exception as raised:
                error = raised
            self._drop_second_half()
            if self.finished:
                return engine.NOTHING  # by this very thread, in between
            # Together, and last: an exception from elsewhere (Ctrl-C) finds it either complete or not.
            self._error, self._finish, self._keep, self.finished = error, None, None, True
            return engine.NOTHING if self._future is None else engine.RESOLVE

    def _goes_on(self) -> bool:
        """Begin the second operation, if there is one; False if it is complete already."""
        then = self._then
        if then is None:
            return False
        handle, lib = 0, engine.start().lib
        lib.mpp_unclaimed()  # of an earlier one, which an exception may have cut off
        try:
            handle = then(self.handle)
        finally:
            if not handle:
                handle = lib.mpp_unclaimed()  # begun, but an exception came right after
            if handle:
                self._first_handle, self.handle, self._then = self.handle, handle, None
                engine.start().own(self)
        self._then = None
        return handle != 0

    def _drop_second_half(self) -> None:
        if self._then is not None:
            self.group.second_halves.discard(self._then)
            self._then = None

    def _abandon(self, error: Exception) -> bool:
        """Fail for the user, while C may still use the buffers; False if it is over already."""
        with self._lock:
            if self.finished:
                return False
            self._drop_second_half()
            self.group.gave_up(self)
            self._error, self.abandoned, self.finished = error, True, True
            return True

    def abandon_aborted(self) -> None:
        """The group was aborted while this waited."""
        if self._abandon(DistBackendError(f"{self}: {self.group.why_aborted()}")):
            self.resolve()

    def check_deadline(self) -> None:
        """Report a long wait to the others; give up when the operation's time is up."""
        # One thread at a time, and no shutdown meanwhile: the group's C part, which lives as long as an
        # operation of it is pending, is asked who has come.
        diagnosis = self.group.diagnosis
        with diagnosis.lock:
            if self.finished or engine.start().lib.mpp_state_of(self.handle) != engine.PENDING:
                return
            late = self.elapsed() >= self.seconds
            why = diagnosis.timed_out if late else diagnosis.look
            failed: Exception | None = DistBackendError(f"{self} timed out after {self.elapsed():.1f} s")
            error = attempt(f"why {self} takes so long", lambda: why(self), failed if late else None)
            if error is None or not self._abandon(error):
                return
        try:
            self.group.failed(error, late)
        finally:
            self.resolve()


class CoalescedWork(Work):
    """Several operations waited for as one."""

    def __init__(self, works: list[Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for all of them, for ``timeout`` together; the first error is raised once all are over, or given up."""
        errors, until = [], time.monotonic() + _seconds(timeout)
        for work in self._works:
            try:
                # Not zero, which would be no limit.
                work.wait(timedelta(seconds=max(0.001, until - time.monotonic())) if timeout else None)
            except DistBackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._works = []  # torch's operators wait once for each tensor
        return True

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        tensors = self._tensors
        together = torch.futures.collect_all([work.get_future() for work in self._works])

        def results(all_of_them: Any) -> list[torch.Tensor]:
            for part in all_of_them.value():
                part.value()  # raises a part's failure
            return tensors

        return together.then(results)
