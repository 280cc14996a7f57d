"""Python's part in a call before it begins, and in its Work.

C reads, counts, records and starts every call, and makes its Work (c_src/python/bridge.c). It asks :func:`prepare`
where the group or the thread is special: it collects calls, is out of step, has got more time, is profiled,
puts what it begins into torch's registry; and where tensors are on a device.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _bridge, forks, torch_internals
from ..engine import profiling
from ..engine.work import Work
from ..errors import DistBackendError
from ..mpi import runtime
from ..tensors import arguments, device
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, kind_of, premul_factor
from . import work_registry
from .device_reductions import halves_of, stage
from .group import Group

#: What is said of a group at an end that is not its own, and what to do about it.
ENDED, FINALIZED = "has ended with the program", "has ended as the program called MPI_Finalize"
_CURES = {
    ENDED: "exit handlers run last registered first: register this one after import torch",
    FINALIZED: "call that after the last operation, or leave it to mpiplus",
}


def begin(group: Group, operation: str) -> None:
    """Check that an operation may start here and now."""
    if forks.forked:
        runtime.refuse_in_forked_child(f"{operation} of {group.label}")
    if group._calls.broken is not None:
        cure = next((cure for end, cure in _CURES.items() if end in group._calls.broken), "make a new group")
        raise DistBackendError(f"{operation}: {group._calls.broken}; {cure}")
    if group._calls.coalescing is not None and torch_internals.is_over(group._coalescing_block):
        group._forget_coalesced()
    if group._engine.only_thread is not None:
        group._engine.check_thread(f"{operation} of {group.label}")


def prepare(
    group: Group,
    operation: str,
    start: str,
    inputs: list[torch.Tensor] | None,
    outputs: list[torch.Tensor],
    root: int,
    lengths: list[int],
    elements: int,
    how: int,
    keep: Any,
) -> tuple[Any, ...]:
    """Called by C, with a call as it has read it, before it begins a special one.

    Args:
        start: the name of the function of C's that starts it.
        inputs: None: what it reads is what it writes.
        root: of a message the other rank; -1: none, or any.
        lengths: of two lists, one after the other, of one for each rank; none where it has no such lists.
        elements: of its tensor, where there is one.
        how: the address of the ``mpp_reduction``; 0: it reduces nothing.
        keep: the memory that C was given, by group/operands.py.

    Returns:
        The staging; the deadline's extra seconds; of two halves the name of the function of C's that starts the first,
        the address of what it takes besides the call, what begins the second one, and what both keep; else nothing.
    """
    begin(group, operation)
    halves, staging, read = None, 0, outputs if inputs is None else inputs
    on_device = [tensor for tensor in (*outputs, *read) if not tensor.is_cpu]
    if on_device:
        halves = halves_of(group, start, outputs[0], root, lengths, elements, how, keep)
        staging = stage(group, on_device[0], not how or halves is not None)
    if profiling.wanted():
        of_group = {"Group size": group.size(), "Process Group Name": group.group_name}
        of_group["Process Group Ranks"] = str(group._global_ranks)
        profiling.begin(group.known_as, operation, root, read, outputs, of_group)
    extension = _extra_seconds(group) if group._calls.extensions else 0.0
    if halves is None:
        return staging, extension, None, 0, None, None
    first_start, first, then, kept = halves
    return staging, extension, first_start, int(group._ffi.cast("uintptr_t", first)), then, (first, kept)


def follow(group: Group, operation: str, work: Work, tensors: list[torch.Tensor]) -> None:
    """Called by C after a call that was special has begun."""
    calls = group._calls
    if calls.extensions:
        for each in calls.extensions:
            each.first = each.first or work
        _extra_seconds(group)  # forgets those that are over
    if profiling.events:
        profiling.end(work)
    if not work.finished and work_registry.wanted():
        work_registry.enter(work, tensors)
    if calls.coalescing is not None:
        calls.coalescing.append((work, [] if operation == "send" else tensors))


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
    """The C description of a reduction; a TypeError: the dtype has none, a ValueError: that makes no sense for it."""
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
