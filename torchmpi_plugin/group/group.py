"""What every group has besides its operations: its life, its deadlines, and how an operation is started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import time_ns
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..communicator import cuda_path
from ..communicator.communicator import Communicator
from ..diagnosis import comparison, flight_recorder
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.flight_recorder import shapes_of
from ..engine import activity, engine, grace, profiling
from ..engine.coalesced import CoalescedWork
from ..engine.contracts import Interrupted
from ..engine.engine import SLICE_NS
from ..engine.work import PendingWork, Work
from ..errors import DistBackendError
from ..mpi import runtime
from ..store.checkin import CheckIn
from ..tensors import arguments, device
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, kind_of, premul_factor
from . import call_path, statistics
from .failures import Failures

#: How long rank 0 keeps the world's store for ranks that leave at about the same time.
_DEPARTURES_SECONDS = 1.0


@dataclass
class Extension:
    """Time added to a group's deadlines, until ``first``, the first operation started after that, is complete."""

    seconds: float
    first: Work | None = None


class Group(Failures):
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
        call_path.connect(self._engine)
        self._lib, self._ffi = self._engine.lib, self._engine.ffi
        self._communicator = communicator
        self._checkin = checkin
        self._handle = self._calls.handle = communicator.handle
        #: CUDA tensors that are only moved are handed to MPI itself.
        self._direct = cuda_path.current.direct
        #: Of torch, that collects operations now. It does not say when an exception has ended it.
        self._coalescing_block: Any = None
        #: Finds out why an operation takes so long.
        self.diagnosis = Diagnosis(self)
        self._closed = False
        self._left = False
        #: This rank holds the world's store: its server ends when the world is destroyed here.
        self.serves_store = False
        self._reductions: dict[Any, Any] = {}
        #: Second halves of operations, still to be begun: the group is needed for them.
        self.second_halves: set[Callable[[], int]] = set()
        self._calls.compares = size > 1 and communicator.compares
        self._calls.largest_tag = communicator.largest_tag
        self._calls.python_only = self._engine.only_thread is not None
        #: The duplicate that torchmpi_plugin.get_comm hands out.
        self.user_communicator: Any = None

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
        self._calls.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """More time for operations started from now on, until the first of them is complete. Several add up."""
        self._calls.extensions.append(Extension(timeout.total_seconds()))

    def _extra_seconds(self) -> float:
        if not self._calls.extensions:
            return 0.0
        self._calls.extensions = [
            each for each in self._calls.extensions if each.first is None or not each.first.finished
        ]
        return sum(each.seconds for each in self._calls.extensions)

    def _begin_extensions(self, work: Work) -> None:
        for extension in self._calls.extensions:
            extension.first = extension.first or work
        self._extra_seconds()  # forgets those that are over

    @property
    def timeout(self) -> timedelta:
        """The deadline of an operation that is given none."""
        return timedelta(seconds=self._calls.timeout)

    def leave(self) -> None:
        """At the end of the program: nobody need wait for this rank any longer."""
        if not self._closed and self._size > 1 and not self._left and not runtime.forked:
            self._left = True
            self._checkin.leave(self._calls.sequence)

    def take_back_failed(self) -> None:
        """Cancel what has failed for the user already, as far as only this process uses its buffers."""
        if not self._closed and any(work.abandoned for work in self._engine.pending() if work.group is self):
            self._lib.mpp_group_abort(self._handle)

    def shutdown(self) -> None:
        """Free the group's communicator and memory, once its operations are complete. Idempotent.

        What does not complete within the exit grace fails, and at once what a thread waits for; what MPI has begun of
        it is left for the end of the process.
        """
        if runtime.forked:
            return
        self._engine.check_thread(f"destroying {self.label}")
        is_leaving = not self._left and not self._closed
        self.leave()
        if is_leaving and self.serves_store:
            self._checkin.wait_for_departures(_DEPARTURES_SECONDS)
        statistics.end(self)
        self.take_back_failed()
        # No thread begins anything from here on; what is under way is waited for, and keeps the memory that it needs.
        self._calls.broken = self._calls.broken or f"{self.label} is destroyed"
        closed, self._closed = self._closed, True
        if not closed:
            self._close_windows()
            grace.wait_until(self._is_idle)
            if self._lib.mpp_group_active(self._handle):
                self._lib.mpp_group_abort(self._handle)
                grace.wait_until(lambda: not activity.is_waited_for(self))
        with self.diagnosis.lock:
            freed = not self.second_halves and self._communicator.free()
        if freed and self.user_communicator is not None:
            with runtime.exclusive():
                self.user_communicator.Free()
            self.user_communicator = None

    def _close_windows(self) -> None:
        """Windows adds this."""

    def _is_idle(self) -> bool:
        """Whether nothing is under way that may still complete, and that nobody is to be freed from."""
        left = [work for work in self._engine.pending() if work.group is self]
        active = int(self._lib.mpp_group_active(self._handle)) + len(self.second_halves)
        return active == sum(work.abandoned for work in left) or activity.is_waited_for(self)

    def abort(self) -> None:
        """Free everybody who waits in this group on this rank; no operation can follow."""
        runtime.refuse_in_forked_child("abort")
        self.run_abort_hooks()
        self._calls.broken = f"{self.label} was aborted"
        self._lib.mpp_group_abort(self._handle)

    def _start_coalescing(self, device: torch.device) -> None:
        self._calls.coalescing = []
        self._coalescing_block = torch_internals.coalescing_block(self._forget_coalesced)

    def _forget_coalesced(self) -> None:
        self._calls.coalescing = self._coalescing_block = None

    def _end_coalescing(self, device: torch.device) -> Any:
        collected = self._calls.coalescing or []
        self._forget_coalesced()
        return CoalescedWork(
            [work for work, _ in collected], [tensor for _, results in collected for tensor in results]
        )

    # ---- starting an operation ----

    def _begin(self, operation: str) -> int:
        """Check that an operation may start here and now; the C group."""
        if runtime.forked:
            runtime.refuse_in_forked_child(operation)
        if self._calls.broken is not None:
            raise DistBackendError(f"{operation}: {self._calls.broken}; make a new group")
        activity.last = self, operation
        if self._calls.coalescing is not None and torch_internals.is_over(self._coalescing_block):
            self._forget_coalesced()
        if self._engine.only_thread is not None:
            self._engine.check_thread(operation)
        if profiling.wanted():
            profiling.begin(operation)
        return self._handle

    def _begin_collective(self, operation: str) -> int:
        """:meth:`_begin` for what all ranks call: counts, so that ranks can tell how far each other is."""
        group = self._begin(operation)
        self._calls.sequence += 1
        return group

    def _compare(self, operation: str, call: comparison.Call, opts: Any) -> None:
        """Where the user asked for it (``compares``): meet all ranks, and see that they are about to call the same.

        Raises:
            DistBackendError: on every rank, if they are not; says who calls what. The group stays usable.
        """
        text = call.describe(operation, with_device=not (call.as_messages or self.mixes_devices))
        mine = comparison.record(text, call, self._size)
        everybody = torch.empty(self._size, mine.numel(), dtype=torch.uint8, device="cpu")
        operands = self._handle, mine.data_ptr(), everybody.data_ptr(), mine.numel(), 0, SLICE_NS
        keep, name = (mine, everybody), text + comparison.COMPARING
        self._issue(name, self._lib.mpp_allgather, operands, True, [], opts, None, keep)
        problem = comparison.disagreement(everybody)
        if problem:
            raise DistBackendError(
                f"{operation} (sequence number {self._calls.sequence}, {self.label}) on rank {self._rank}: detected "
                f"mismatch between collectives on ranks: {problem}. Nothing was sent; the group can be used again"
            )

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
        if profiling.events:
            profiling.describe(operation, tensors if inputs is None else inputs, tensors, self._told_to_profilers)
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
        if self._calls.extensions:
            self._begin_extensions(work)
        if profiling.events:
            profiling.end(work)
        if self._calls.coalescing is not None:
            self._calls.coalescing.append((work, [] if operation == "send" else tensors))
        return work

    def _told_to_profilers(self) -> dict[str, Any]:
        return {
            "Group size": self._size,
            "Process Group Name": self.group_name,
            "Process Group Ranks": str(self._global_ranks),
        }

    def _entry(
        self, operation: str, peer: int | None, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """What the flight recorder keeps of an operation."""
        shapes = shapes_of(tensors)
        made_of = shapes if inputs is None else shapes_of(inputs)
        if peer is not None:
            self._calls.messages += 1
        calls = self._calls
        entry = calls.subject, operation, calls.sequence, calls.messages, peer, made_of, shapes, time_ns()
        if peer is None:
            calls.last = entry
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
        number = self._calls.sequence if peer is None else self._calls.messages
        limit = self._calls.timeout
        work = PendingWork.begun(handle, self, operation, number, peer, opts, limit, tensors, finish, keep, then)
        if self._calls.extensions:
            work.extension = self._extra_seconds()
        return work

    def _go_on(
        self,
        handle: int,
        operation: str,
        peer: int | None,
        opts: Any,
        tensors: list[torch.Tensor],
        keep: Any,
        entry: tuple[Any, ...],
        sync: bool,
    ) -> Work:
        """What C has begun, and is not done with: called by c_src/python/bridge.c."""
        work = self._pending(handle, operation, peer, opts, tensors, None, keep, None)
        recorder = flight_recorder.current
        if recorder is not None:
            recorder.append(flight_recorder.of_pending(entry, work))
        self._take_care_of(work, sync)
        return work

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

    starting = frozenset((_issue.__code__, _go_on.__code__))

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
            raise arguments.ArgumentTypeError(f"{operation}: {dtype} cannot be reduced with {kind}")
        boolean_sum = dtype is torch.bool and kind in (AVG, PREMUL_SUM)
        if boolean_sum or not self._lib.mpp_reduction_supported(code, operation_code):
            raise arguments.ArgumentError(f"{operation}: {kind.name} makes no sense for {dtype}")
        how = self._ffi.new("mpp_reduction *")
        how.dtype, how.op, how.premul, how.divisor = code, operation_code, 1.0, 1
        if kind == AVG:
            how.divisor = self._size
        if kind == PREMUL_SUM:
            how.has_premul, how.premul = 1, premul_factor(op)
        else:
            self._reductions[key] = how
        return how
