"""The errors of a group's operations that fail."""

from __future__ import annotations

from typing import Any

from ..diagnosis import comparison
from ..engine import engine
from ..engine.work import PendingWork, in_words
from ..errors import DistBackendError, RankFailedError
from ..mpi import failures
from ..names import describe_ranks
from ..tensors import device
from ..tensors.dtypes import describe_disagreement


def failure_of(group: Any, call: PendingWork) -> Exception:
    """The error of an operation of a group that C or MPI gave up, and what it means for the group."""
    lib, ffi = group._lib, group._ffi
    code, first, second = ffi.new("int *"), ffi.new("int64_t *"), ffi.new("int64_t *")
    failure = lib.mpp_failure_of(call.handle, code, first, second)
    particulars = f"{call} failed on rank {group.rank()} after {call.elapsed():.1f} s"
    if failure not in (lib.MPP_FAILURE_LENGTH, lib.MPP_FAILURE_MISMATCH):  # after these nothing is left
        group.gave_up(call)
    if lib.mpp_windows_failed(call.handle):
        group.break_off("what was sent to its windows could not be received")
    if failure == lib.MPP_FAILURE_MEMORY:
        if call.peer is None and not first[0]:  # the others may make it, and then be one further
            group.break_off(f"{call} ran out of memory on rank {group.rank()}")
        return MemoryError(f"{call.name}: out of memory ({particulars})")
    if failure == lib.MPP_FAILURE_LENGTH:
        return DistBackendError(
            f"{call.name}: the message has {second[0]} bytes, the tensor takes {first[0]}; both sides must agree "
            f"({particulars})"
        )
    if failure == lib.MPP_FAILURE_MISMATCH:
        mine, theirs = ffi.new("mpp_call *"), ffi.new("mpp_call *")
        lib.mpp_disagreement(call.handle, mine, theirs)
        text = (
            f"the ranks disagree: {describe_disagreement(first[0], mine, theirs, second[0])}; this rank, "
            f"{group.rank()}, calls {in_words(call.name, call._tensors)}"
        )
        if group._calls.compares and theirs.kind != lib.MPP_NO_MEMORY:  # a rank without memory would tell nothing
            text = comparison.who_calls_what(group.checkin, call) or text
        return DistBackendError(f"{text}. No result was written; the group can be used again ({particulars})")
    if failure == lib.MPP_FAILURE_CUDA:
        group.break_off(f"{call} failed")
        where = first[0] - 1 if first[0] else group.rank()
        return DistBackendError(f"{call.name}: {device.error_text(lib, ffi, code[0])} on rank {where} ({particulars})")
    if failure == lib.MPP_FAILURE_CANCELLED:
        return call.if_cancelled or DistBackendError(f"{particulars}: {group._calls.broken or 'cancelled'}")
    return _failure_in_mpi(group, call, particulars, code[0])


def _failure_in_mpi(group: Any, call: PendingWork, text: str, code: int) -> Exception:
    if call.peer is None:
        group.break_off(f"{call} failed")
    if failures.is_process_failure(code):
        dead = failures.failed_ranks(group.communicator.comm)
        who = describe_ranks(dead) if dead else "a rank, as another one says,"
        ranks = [group.global_rank(rank) for rank in dead]
        return RankFailedError(f"{text}: {who} has died. torchmpi_plugin.shrink() goes on without", ranks=ranks)
    return DistBackendError(f"{text}: {engine.mpi_error_text(code)}")
