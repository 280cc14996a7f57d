"""The errors of a group's operations that fail."""

from __future__ import annotations

from typing import Any

from ..diagnosis import comparison
from ..engine.work import PendingWork
from ..errors import DistBackendError, RankFailedError
from ..mpi import failures, runtime
from ..names import describe_ranks
from ..tensors import device
from ..tensors.dtypes import describe_disagreement


def failure_of(group: Any, work: PendingWork) -> Exception:
    """The error of an operation of a group that C or MPI gave up, and what it means for the group."""
    lib, ffi = group._lib, group._ffi
    code, first, second = ffi.new("int *"), ffi.new("int64_t *"), ffi.new("int64_t *")
    failure = lib.mpp_failure_of(work.handle, code, first, second)
    particulars = f"{work} failed on rank {group.rank()} after {work.elapsed():.1f} s"
    if failure not in (lib.MPP_FAILURE_LENGTH, lib.MPP_FAILURE_MISMATCH):  # after these nothing is left
        group.gave_up(work)
    if lib.mpp_windows_failed(work.handle):
        group.break_off("what was sent to its windows could not be received")
    if failure == lib.MPP_FAILURE_MEMORY:
        if work.call.peer is None and not first[0]:  # the others may make it, and then be one further
            group.break_off(f"{work} ran out of memory on rank {group.rank()}")
        return MemoryError(f"{work.call.operation}: out of memory ({particulars})")
    if failure == lib.MPP_FAILURE_LENGTH:
        return DistBackendError(
            f"{work.call.operation}: the message has {second[0]} bytes, the tensor takes {first[0]}; both sides "
            f"must agree ({particulars})"
        )
    if failure == lib.MPP_FAILURE_MISMATCH:
        mine, theirs = ffi.new("mpp_call *"), ffi.new("mpp_call *")
        lib.mpp_disagreement(work.handle, mine, theirs)
        where, call = (group.rank(), mine) if mine.kind == lib.MPP_NO_MEMORY else (first[0], theirs)
        text = (
            f"the ranks disagree: {describe_disagreement(first[0], mine, theirs, second[0])}; this rank, "
            f"{group.rank()}, calls {comparison.in_full(work)}"
        )
        if call.kind == lib.MPP_NO_MEMORY and call.own:
            text = f"{work.call.operation}: {device.error_text(lib, ffi, call.own)} on rank {where}"
        elif group._calls.compares and call.kind != lib.MPP_NO_MEMORY:  # a rank without memory would tell nothing
            text = comparison.who_calls_what(group.checkin, work) or text
        return DistBackendError(f"{text}. No result was written; the group can be used again ({particulars})")
    if failure == lib.MPP_FAILURE_CUDA:
        group.break_off(f"{work} failed")
        name, where = work.call.operation, first[0] - 1 if first[0] else group.rank()
        return DistBackendError(f"{name}: {device.error_text(lib, ffi, code[0])} on rank {where} ({particulars})")
    if failure == lib.MPP_FAILURE_CANCELLED:
        return work.if_cancelled or DistBackendError(f"{particulars}: {group.why_aborted()}")
    return _failure_in_mpi(group, work, particulars, code[0])


def _failure_in_mpi(group: Any, work: PendingWork, text: str, code: int) -> Exception:
    if work.call.peer is None:
        group.break_off(f"{work} failed")
    if failures.is_process_failure(code):
        dead = failures.failed_ranks(group.communicator.comm)
        who = describe_ranks(dead) if dead else "a rank, as another one says,"
        ranks = [group.global_rank(rank) for rank in dead]
        return RankFailedError(f"{text}: {who} has died. torchmpi_plugin.shrink() goes on without", ranks=ranks)
    return DistBackendError(f"{text}: {runtime.mpi().Get_error_string(code)}")
