"""Python's part in a call before it begins, and in its Work.

C reads, counts, records and starts every call, and makes its Work (c_src/python/bridge.c). It asks :func:`prepare`
where the group or the thread is special: it collects calls, is out of step, has got more time, is profiled;
and where tensors are on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _bridge, torch_internals
from ..engine import profiling
from ..engine.work import Work
from ..errors import DistBackendError
from ..mpi import runtime
from ..tensors import arguments, device
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, kind_of, premul_factor
from . import device_reductions
from .device_reductions import Halves, stage
from .group import ProcessGroupMPI as Group

#: What is said of a group at an end that is not its own, and what to do about it.
ENDED, FINALIZED = "has ended with the program", "has ended as the program called MPI_Finalize"
_CURES = {
    ENDED: "exit handlers run last registered first: register this one after import torch",
    FINALIZED: "call that after the last operation, or leave it to mpiplus",
}


class Call(NamedTuple):
    """A call as C has read it."""

    group: Any
    operation: str  # its name
    start: str  # the name of the function of C's that starts it
    inputs: list[torch.Tensor] | None  # None: what it reads is what it writes
    outputs: list[torch.Tensor]
    root: int  # -1: none
    lengths: list[int]  # of two lists, one after the other, of one for each rank; none where it has no such lists
    elements: int  # of its tensor, where there is one
    how: int  # the address of the ``mpp_reduction``; 0: it reduces nothing
    keep: Any  # the memory that C was given, by group/operands.py


def begin(group: Group, operation: str) -> None:
    """Check that an operation may start here and now."""
    if runtime.forked:
        runtime.refuse_in_forked_child(operation)
    if group._calls.broken is not None:
        cure = next((cure for end, cure in _CURES.items() if end in group._calls.broken), "make a new group")
        raise DistBackendError(f"{operation}: {group._calls.broken}; {cure}")
    if group._calls.coalescing is not None and torch_internals.is_over(group._coalescing_block):
        group._forget_coalesced()
    if group._engine.only_thread is not None:
        group._engine.check_thread(operation)


def prepare(*read: Any) -> tuple[Any, ...]:
    """Called by C, with what :class:`Call` has, before it begins a special call.

    Returns:
        The staging; the deadline's extra seconds; of two halves the name of the function of C's that starts the first,
        the address of what it takes besides the call, what begins the second one, and what both keep; else nothing.
    """
    call = Call(*read)
    group, halves, staging = call.group, None, 0
    begin(group, call.operation)
    inputs = call.outputs if call.inputs is None else call.inputs
    on_device = [tensor for tensor in (*call.outputs, *inputs) if not tensor.is_cpu]
    if on_device:
        halves = _on_device(call)
        staging = stage(group, on_device[0], not call.how or halves is not None)
    if profiling.wanted():
        of_group = {"Group size": group.size(), "Process Group Name": group.group_name}
        of_group["Process Group Ranks"] = str(group._global_ranks)
        profiling.begin(call.operation, inputs, call.outputs, of_group)
    extension = _extra_seconds(group) if group._calls.extensions else 0.0
    if halves is None:
        return staging, extension, None, 0, None, None
    start, first, then, keep = halves
    return staging, extension, start, int(group._ffi.cast("uintptr_t", first)), then, (first, keep)


def follow(group: Group, operation: str, work: Work, tensors: list[torch.Tensor]) -> None:
    """Called by C after a call that was special has begun."""
    calls = group._calls
    if calls.extensions:
        for each in calls.extensions:
            each.first = each.first or work
        _extra_seconds(group)  # forgets those that are over
    if profiling.events:
        profiling.end(work)
    if calls.coalescing is not None:
        calls.coalescing.append((work, [] if operation == "send" else tensors))


def _on_device(call: Call) -> Halves | None:
    """Return what reduces where the tensors lie; None: C does, in host memory, or there is nothing to do."""
    group, dtype = call.group, call.outputs[0].dtype
    if not call.how or call.start not in ("allreduce", "reduce_to", "reduce_scatter"):
        return None
    reads = not group._direct and bool(group._lib.mpp_group_reads_devices(group._handle))
    how = group._ffi.new("mpp_reduction *", group._ffi.cast("mpp_reduction *", call.how)[0])
    counts = call.lengths[: group.size()] or [call.elements]
    limit = group.communicator.choice.limit("cuda_sums" if reads else "cuda_reductions")
    if not (reads or group._direct) or not device_reductions.suits(
        call.outputs[0], sum(counts) * dtype.itemsize, how, limit
    ):
        return None
    try:
        return _reducing(call, counts, how, reads)
    except torch.OutOfMemoryError:
        if not reads:
            raise
        return None  # it goes through shared memory


def _reducing(call: Call, counts: Sequence[int], how: Any, reads: bool) -> Halves:
    """Return what reduces by messages of MPI, or where each rank ``reads`` from the others' devices."""
    if call.start != "reduce_scatter":
        begin = device_reductions.between_devices if reads else device_reductions.to_ranks
        return begin(call.group, call.keep, how, call.root)
    inputs, [output] = call.keep
    whole = inputs if len(inputs) > 1 else inputs[0]
    begin_blocks = device_reductions.scatter_between_devices if reads else device_reductions.to_one
    return begin_blocks(call.group, whole, counts, output, how)


def tell_of_no_call(group: Group, error: BaseException, operation: str, before: int, calls: int = 1) -> None:
    """Of a call that torch has no memory for, or the driver fails: the others learn so in its place.

    The group can go on.

    Args:
        error: torch's.
        before: how many collectives the group had begun before it.
        calls: of how many collectives it consists.
    """
    while group._calls.sequence < before + calls:
        method = _bridge.Method(None, operation, "no_memory", "error")
        _bridge.start_plain(method, (group, device.code_of(error)), None, None, None, 1)


def _extra_seconds(group: Group) -> float:
    calls = group._calls
    calls.extensions = [each for each in calls.extensions if each.first is None or not each.first.finished]
    return sum(each.seconds for each in calls.extensions)


def reduction(group: Group, dtype: torch.dtype, op: Any, operation: str) -> Any:
    """The C description of a reduction.

    Raises:
        TypeError: a dtype that cannot be reduced.
        ValueError: an operation that makes no sense for it.
    """
    kind = kind_of(op)
    code, operation_code = DTYPES.get(dtype), OPERATIONS.get(kind)
    if code is None or operation_code is None:
        raise arguments.ArgumentTypeError(f"{operation}: {dtype} cannot be reduced with {kind}")
    boolean_sum = dtype is torch.bool and kind in (AVG, PREMUL_SUM)
    if boolean_sum or not group._lib.mpp_reduction_supported(code, operation_code):
        raise arguments.ArgumentError(f"{operation}: {kind.name} makes no sense for {dtype}")
    how = {"dtype": code, "op": operation_code, "premul": 1.0, "divisor": group.size() if kind == AVG else 1}
    if kind == PREMUL_SUM:
        how |= {"has_premul": 1, "premul": premul_factor(op)}
    return group._ffi.new("mpp_reduction *", how)
