"""What becomes of a group's operations that do not complete: who has come, what is given up, and the error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..communicator.communicator import Communicator
from ..engine import engine
from ..engine.work import PendingWork
from ..errors import DistBackendError, RankFailedError
from ..mpi import failures
from ..names import describe_ranks
from ..tensors import device
from ..tensors.dtypes import describe_disagreement
from .hooks import Hooks

if TYPE_CHECKING:
    from .._shim import FFI, Lib


class Failures(Hooks):
    """Failures of a group's operations, and what they mean for the group."""

    _lib: Lib
    _ffi: FFI
    _communicator: Communicator

    @property
    def label(self) -> str:
        """How messages call the group."""
        what = f" ({self._description})" if self._description not in ("", "undefined", self._name) else ""
        return f"group {self._name!r}{what}"

    @property
    def communicator(self) -> Communicator:
        """MPI's side of the group."""
        return self._communicator

    def break_off(self, why: str) -> None:
        """No operation can follow: the ranks no longer agree on which one is next."""
        self._calls.broken = f"{self.label} is out of step since {why}"

    def has_arrived(self, call: PendingWork, rank: int) -> bool:
        """Whether ``rank`` is known to have come to this operation."""
        return int(self._lib.mpp_arrived(call.handle, rank)) > 0

    def is_through(self, call: PendingWork, rank: int) -> bool:
        """Whether ``rank`` is known to have done all of its part in this operation."""
        return int(self._lib.mpp_arrived(call.handle, rank)) > 1

    def can_see_arrivals(self, call: PendingWork) -> bool:
        """Whether :meth:`has_arrived` knows: only where all ranks share memory."""
        return all(int(self._lib.mpp_arrived(call.handle, rank)) >= 0 for rank in range(self._size))

    def gave_up(self, call: PendingWork) -> None:
        """``call`` has failed here: what others send for it, over MPI, may come and find nobody."""
        if not self._communicator.shares_memory or not self.can_see_arrivals(call):
            self._communicator.may_be_sent_to = True

    def take_back(self, call: PendingWork) -> None:
        """Cancel a receive that nothing has matched yet."""
        self._lib.mpp_cancel(call.handle)

    def global_rank(self, rank: int) -> int:
        """The rank in the world."""
        return self._global_ranks[rank]

    def failure_of(self, call: PendingWork) -> Exception:
        """The error of an operation that C or MPI gave up."""
        lib = self._lib
        code, first, second = self._ffi.new("int *"), self._ffi.new("int64_t *"), self._ffi.new("int64_t *")
        failure = lib.mpp_failure_of(call.handle, code, first, second)
        text = f"{call} failed on rank {self._rank} after {call.elapsed():.1f} s"
        if failure not in (lib.MPP_FAILURE_LENGTH, lib.MPP_FAILURE_MISMATCH):  # after these nothing is left
            self.gave_up(call)
        if failure == lib.MPP_FAILURE_MEMORY:
            if call.peer is None and not first[0]:  # the others may make it, and then be one further
                self.break_off(f"{call} ran out of memory on rank {self._rank}")
            return MemoryError(f"{text}: out of memory")
        if failure == lib.MPP_FAILURE_LENGTH:
            return DistBackendError(
                f"{text}: the message has {second[0]} bytes, the tensor takes {first[0]}; both sides must agree"
            )
        if failure == lib.MPP_FAILURE_MISMATCH:
            mine, theirs = self._ffi.new("mpp_call *"), self._ffi.new("mpp_call *")
            lib.mpp_disagreement(call.handle, mine, theirs)
            return DistBackendError(
                f"{text}: the ranks disagree: {describe_disagreement(first[0], mine, theirs, second[0])}. Nothing was "
                f"reduced or sent; the group can be used again"
            )
        if failure == lib.MPP_FAILURE_CUDA:
            self.break_off(f"{call} failed")
            return DistBackendError(f"{text}: {device.error_text(lib, self._ffi, code[0])}")
        if failure == lib.MPP_FAILURE_CANCELLED:
            return call.if_cancelled or DistBackendError(f"{text}: {self._calls.broken or 'cancelled'}")
        return self._failure_in_mpi(call, text, code[0])

    def _failure_in_mpi(self, call: PendingWork, text: str, code: int) -> Exception:
        if call.peer is None:
            self.break_off(f"{call} failed")
        if failures.is_process_failure(code):
            dead = failures.failed_ranks(self._communicator.comm)
            who = describe_ranks(dead) if dead else "a rank, as another one says,"
            ranks = [self.global_rank(rank) for rank in dead]
            return RankFailedError(f"{text}: {who} has died. torchmpi_plugin.shrink() goes on without", ranks=ranks)
        return DistBackendError(f"{text}: {engine.mpi_error_text(code)}")
