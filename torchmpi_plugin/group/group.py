"""What every group has besides its operations: identity, life, and what happens when one takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import time_ns
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from . import (
    agreement,
    arguments,
    cuda_path,
    device,
    engine,
    flight_recorder,
    mpi_runtime,
    processes,
    profiling,
    shutdown,
    status,
)
from .checkin import CheckIn
from .communicator import Communicator
from .diagnosis import Diagnosis
from .dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, describe_disagreement, kind_of, premul_factor
from .errors import DistBackendError, RankFailedError, describe_ranks
from .flight_recorder import shapes_of
from .hooks import Hooks
from .work import CoalescedWork, PendingWork, Work

#: A call that an exception ended: the group, then what ``_issue`` was given.
Interrupted: TypeAlias = tuple[
    "Group",
    str,
    "int | None",
    Any,
    "list[torch.Tensor]",
    arguments.Finish,
    Any,
    "Callable[[], int] | None",
]

_FAILURE_MEMORY, _FAILURE_LENGTH, _FAILURE_CANCELLED, _FAILURE_MISMATCH, _FAILURE_CUDA = 2, 3, 4, 5, 6


@dataclass
class Extension:
    """Time added to deadlines, until ``first``, the first operation started after that, is complete."""

    seconds: float
    first: Work | None = None


class Group(Hooks):
    """A c10d process group without operations; :class:`ProcessGroupMPI` adds those.

    Thread safety: operations may be called from several threads, on one group only in an order that all
    ranks share, which is the caller's affair.
    """

    def __init__(
        self,
        communicator: Communicator,
        checkin: CheckIn,
        store: dist.Store,
        name: str,
        global_ranks: Sequence[int],
        timeout: timedelta,
    ) -> None:
        rank, size = communicator.comm.Get_rank(), communicator.comm.Get_size()
        super().__init__(rank, size, name, global_ranks, store, timeout)
        self._engine = engine.start()
        self._lib, self._ffi = self._engine.lib, self._engine.ffi
        self._communicator = communicator
        self._checkin = checkin
        self._handle = communicator.handle
        #: CUDA tensors that are only moved are handed to MPI itself.
        self._direct = cuda_path.current.direct
        #: Finds out why an operation takes so long.
        self.diagnosis = Diagnosis(self)
        self._broken: str | None = None
        self._closed = False
        self._left = False
        self._reductions: dict[Any, Any] = {}
        #: The operations to become one Work, with the results of each.
        self._coalescing: list[tuple[Work, list[torch.Tensor]]] | None = None
        #: Second halves of operations, still to be begun: the group is needed for them.
        self.second_halves: set[Callable[[], int]] = set()
        self._extensions: list[Extension] = []
        self._compares = size > 1 and communicator.compares
        #: The duplicate that torchmpi_plugin.get_comm hands out.
        self.user_communicator: Any = None

    @property
    def label(self) -> str:
        """How messages call the group."""
        what = f" ({self._description})" if self._description not in ("", "undefined", self._name) else ""
        return f"group {self._name!r}{what}"

    @property
    def communicator(self) -> Communicator:
        """MPI's side of the group."""
        return self._communicator

    @property
    def mixes_devices(self) -> bool:
        """Whether ranks with CPU tensors and ranks with CUDA tensors may meet in one collective."""
        return self._communicator.shares_memory and not self._direct

    @property
    def checkin(self) -> CheckIn:
        """The group's corner of the store."""
        return self._checkin

    @property
    def closed(self) -> bool:
        """Whether the group was destroyed."""
        return self._closed

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations started from now on."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """More time for operations started from now on, until the first of them is complete. Several add up."""
        self._extensions.append(Extension(timeout.total_seconds()))

    def _extra_seconds(self) -> float:
        if not self._extensions:
            return 0.0
        self._extensions = [each for each in self._extensions if each.first is None or not each.first.finished]
        return sum(each.seconds for each in self._extensions)

    def _begin_extensions(self, work: Work) -> None:
        for extension in self._extensions:
            extension.first = extension.first or work
        self._extra_seconds()  # forgets those that are over

    @property
    def timeout(self) -> timedelta:
        """The deadline of an operation that is given none."""
        return timedelta(seconds=self._timeout)

    def leave(self) -> None:
        """At the end of the program: nobody need wait for this rank any longer."""
        if not self._closed and self._size > 1 and not self._left:
            self._left = True
            self._checkin.leave(self._sequence)

    def take_back_failed(self) -> None:
        """Cancel what has failed for the user already, as far as only this process uses its buffers."""
        if not self._closed and any(work.abandoned for work in self._engine.pending() if work.group is self):
            self._lib.mpp_group_abort(self._handle)

    def shutdown(self) -> None:
        """Free the group's communicator and memory, once its operations are complete. Idempotent.

        What does not complete within the exit grace fails, and at once what a thread waits for; what MPI has begun of
        it is left for the end of the process.
        """
        if mpi_runtime.forked:
            return
        self._engine.check_thread(f"destroying {self.label}")
        self.leave()
        status.stop(self)
        self.take_back_failed()
        # From here on no thread begins anything; what one has begun already is waited for, and C keeps the memory it
        # needs as long as this object and its Works are there.
        self._broken = self._broken or f"{self.label} is destroyed"
        closed, self._closed = self._closed, True
        if not closed:
            self._close_windows()
            shutdown.wait_until(self._is_idle)
            if self._lib.mpp_group_active(self._handle):
                self._lib.mpp_group_abort(self._handle)
                shutdown.wait_until(lambda: not status.is_waited_for(self))
        with self.diagnosis.lock:
            freed = not self.second_halves and self._communicator.free()
        if freed and self.user_communicator is not None:
            with mpi_runtime.exclusive():
                self.user_communicator.Free()
            self.user_communicator = None

    def _close_windows(self) -> None:
        """Windows adds this."""

    def _is_idle(self) -> bool:
        """Whether nothing is under way that may still complete, and that nobody is to be freed from."""
        left = [work for work in self._engine.pending() if work.group is self]
        active = int(self._lib.mpp_group_active(self._handle)) + len(self.second_halves)
        return active == sum(work.abandoned for work in left) or status.is_waited_for(self)

    def break_off(self, why: str) -> None:
        """No operation can follow: the ranks no longer agree on which one is next."""
        self._broken = f"{self.label} is out of step since {why}"

    def abort(self) -> None:
        """Free everybody who waits in this group on this rank; no operation can follow."""
        self.run_abort_hooks()
        self._broken = f"{self.label} was aborted"
        self._lib.mpp_group_abort(self._handle)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        collected, self._coalescing = self._coalescing or [], None
        return CoalescedWork(
            [work for work, _ in collected], [tensor for _, results in collected for tensor in results]
        )

    # ---- starting an operation ----

    def _begin(self, operation: str) -> int:
        """Check that an operation may start here and now; the C group."""
        if mpi_runtime.forked:
            mpi_runtime.refuse_in_forked_child(operation)
        if self._broken is not None:
            raise DistBackendError(f"{operation}: {self._broken}; make a new group")
        status.last = self, operation
        if self._engine.only_thread is not None:
            self._engine.check_thread(operation)
        if profiling.wanted():
            profiling.begin(operation)
        return self._handle

    def _begin_collective(self, operation: str) -> int:
        """:meth:`_begin` for what all ranks call: counts, so that ranks can tell how far each other is."""
        group = self._begin(operation)
        self._sequence += 1
        return group

    def _compare(self, operation: str, call: agreement.Call, opts: Any) -> None:
        """Where the user asked for it (``_compares``): whether all ranks are about to make the same call."""
        agreement.check(self, operation, call, opts)

    def _stage(self, tensor: torch.Tensor, moves: bool = False) -> int:
        """What C needs to know about an operation on CUDA tensors, just before it starts.

        Args:
            tensor: one of them.
            moves: the operation reduces nothing, so MPI may be able to do it on the device.
        """
        direct = moves and self._direct
        return device.stage(self._lib, self._ffi, tensor, direct, self._communicator.place.local_rank)

    def _issue(
        self,
        operation: str,
        start: Callable[..., int],
        operands: tuple[Any, ...],
        sync: bool,
        tensors: list[torch.Tensor],
        opts: Any = None,
        finish: arguments.Finish = None,
        keep: Any = None,
        peer: int | None = None,
        then: Callable[[], int] | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Start an operation in C, and make its Work.

        Args:
            start, operands: the function of C, which returns 0 if the operation is complete, and what it takes.
            tensors: the results; of a send, what is sent.
            inputs: what they are made of, where that is not themselves.
        """
        entry = self._entry(operation, peer, tensors, inputs)
        try:
            handle = start(*operands)
            if handle == 0 and then is not None:
                second, then = then, None
                handle = second()
            if handle == 0:
                if finish is not None:
                    finish()
                work = Work()
                work._tensors = tensors
            else:
                work = self._pending(handle, operation, peer, opts, tensors, finish, keep, then)
            recorder = flight_recorder.current
            if recorder is not None:
                recorder.append(entry if handle == 0 else flight_recorder.of_pending(entry, work))
            if isinstance(work, PendingWork):
                self._take_care_of(work, sync)
        except BaseException:
            # First of all, and with nothing before it that a second exception could interrupt.
            call = (self, operation, peer, opts, tensors, finish, (operands, keep), then)
            self._engine.interrupted.append(call)
            self._engine.recover(call)
            raise
        if self._extensions:
            self._begin_extensions(work)
        if profiling.events:
            profiling.end(work)
        if self._coalescing is not None:
            self._coalescing.append((work, [] if operation == "send" else tensors))
        return work

    #: How to recognise a call that is starting an operation.
    starting = _issue.__code__

    def _entry(
        self, operation: str, peer: int | None, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """What the flight recorder keeps of an operation."""
        shapes = shapes_of(tensors)
        made_of = shapes if inputs is None else shapes_of(inputs)
        if peer is not None:
            self._messages += 1
        entry = self.subject, operation, self._sequence, self._messages, peer, made_of, shapes, time_ns()
        if peer is None:
            self.diagnosis.last = entry
        return entry

    def _pending(
        self,
        handle: int,
        operation: str,
        peer: int | None,
        opts: Any,
        tensors: list[torch.Tensor],
        finish: arguments.Finish,
        keep: Any,
        then: Callable[[], int] | None,
    ) -> PendingWork:
        number = self._sequence if peer is None else self._messages
        return PendingWork(handle, self, operation, number, peer, self._seconds(opts), tensors, finish, keep, then)

    def adopt(self, handle: int, calls: Sequence[Interrupted]) -> PendingWork:
        """The Work of an operation whose call, the last of ``calls``, could not make it."""
        _, operation, peer, opts, tensors, finish, _, then = calls[-1]
        work = self._pending(handle, operation, peer, opts, tensors, finish, calls, then)
        work.caller = threading.get_ident()
        return work

    def _take_care_of(self, work: PendingWork, sync: bool) -> None:
        if sync:
            work.caller = threading.get_ident()
        self._engine.own(work)
        if self._engine.interrupted:
            self._engine.recover()
        if sync:
            work.wait()
        else:
            self._engine.watch(work)

    def _seconds(self, opts: Any) -> float:
        """The deadline: the call's own, else the group's."""
        own = opts.timeout.total_seconds() if opts is not None else 0.0
        return (own if own > 0 else self._timeout) + self._extra_seconds()

    def _reduction(self, dtype: torch.dtype, op: Any, operation: str) -> Any:
        """The C description of a reduction.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: an operation that makes no sense for it.
        """
        kind = kind_of(op)
        key = dtype, int(kind)  # the enum itself is ten times slower to look up
        how = self._reductions.get(key)
        if how is not None:
            return how
        code, operation_code = DTYPES.get(dtype), OPERATIONS.get(kind)
        if code is None or operation_code is None:
            raise TypeError(f"{operation}: {dtype} cannot be reduced with {kind}")
        boolean_sum = dtype is torch.bool and kind in (AVG, PREMUL_SUM)
        if boolean_sum or not self._lib.mpp_reduction_supported(code, operation_code):
            raise ValueError(f"{operation}: {kind.name} makes no sense for {dtype}")
        how = self._ffi.new("mpp_reduction *")
        how.dtype, how.op, how.premul, how.divisor = code, operation_code, 1.0, 1
        if kind == AVG:
            how.divisor = self._size
        if kind == PREMUL_SUM:
            how.has_premul, how.premul = 1, premul_factor(op)
        else:
            self._reductions[key] = how
        return how

    # ---- when it takes long, or fails ----

    def has_arrived(self, call: PendingWork, rank: int) -> bool:
        """Whether ``rank`` is known to have come to this operation."""
        return int(self._lib.mpp_arrived(call.handle, rank)) == 1

    def can_see_arrivals(self, call: PendingWork) -> bool:
        """Whether :meth:`has_arrived` knows: only over shared memory does it."""
        return int(self._lib.mpp_arrived(call.handle, self._rank)) >= 0

    def gave_up(self, call: PendingWork) -> None:
        """``call`` has failed here: what others send for it, over MPI, may come and find nobody."""
        if not self.can_see_arrivals(call):
            self._communicator.littered = True

    def take_back(self, call: PendingWork) -> None:
        """Cancel a receive that nothing has matched yet."""
        self._lib.mpp_cancel(call.handle)

    def global_rank(self, rank: int) -> int:
        """The rank in the world."""
        return self._global_ranks[rank]

    def failure_of(self, call: PendingWork) -> Exception:
        """The error of an operation that C or MPI gave up."""
        code, first, second = self._ffi.new("int *"), self._ffi.new("int64_t *"), self._ffi.new("int64_t *")
        failure = self._lib.mpp_failure_of(call.handle, code, first, second)
        text = f"{call} failed on rank {self._rank} after {call.elapsed():.1f} s"
        if failure not in (_FAILURE_LENGTH, _FAILURE_MISMATCH):  # after these nothing is left
            self.gave_up(call)
        if failure == _FAILURE_MEMORY:
            if call.peer is None and not first[0]:  # the others may make it, and then be one further
                self.break_off(f"{call} ran out of memory on rank {self._rank}")
            return MemoryError(f"{text}: out of memory")
        if failure == _FAILURE_LENGTH:
            return DistBackendError(
                f"{text}: the message has {second[0]} bytes, the tensor takes {first[0]}; both sides must agree"
            )
        if failure == _FAILURE_MISMATCH:
            mine, theirs = self._ffi.new("mpp_call *"), self._ffi.new("mpp_call *")
            self._lib.mpp_disagreement(call.handle, mine, theirs)
            return DistBackendError(
                f"{text}: the ranks disagree: {describe_disagreement(first[0], mine, theirs, second[0])}. Nothing was "
                f"reduced or sent; the group can be used again"
            )
        if failure == _FAILURE_CUDA:
            self.break_off(f"{call} failed")
            return DistBackendError(f"{text}: {device.error_text(self._lib, self._ffi, code[0])}")
        if failure == _FAILURE_CANCELLED:
            return call.if_cancelled or DistBackendError(f"{text}: {self._broken or 'cancelled'}")
        return self._failure_in_mpi(call, text, code[0])

    def _failure_in_mpi(self, call: PendingWork, text: str, code: int) -> Exception:
        if call.peer is None:
            self.break_off(f"{call} failed")
        if processes.is_process_failure(code):
            dead = processes.failed_ranks(self._communicator.comm)
            who = describe_ranks(dead) if dead else "a rank, as another one says,"
            ranks = [self.global_rank(rank) for rank in dead]
            return RankFailedError(f"{text}: {who} has died. torchmpi_plugin.shrink() goes on without", ranks=ranks)
        return DistBackendError(f"{text}: {engine.mpi_error_text(code)}")
