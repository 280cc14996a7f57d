"""Python's part in a call before it begins, and in its Work; and mpiplus's own operations.

C reads, counts, records and starts every call, and makes its Work (c_src/python/bridge.c). It asks :func:`prepare`
where the group or the thread is special: it compares or collects calls, is out of step, has got more time, is profiled;
and where tensors are on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .. import _bridge, torch_internals
from ..diagnosis import comparison
from ..diagnosis.comparison import Call
from ..diagnosis.flight_recorder import shapes_of
from ..engine import profiling
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..errors import DistBackendError
from ..mpi import runtime
from ..tensors import arguments
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
    if profiling.wanted():
        profiling.begin(operation)


def prepare(*read: Any) -> tuple[Any, ...]:
    """Called by C, with what :class:`~torchmpi_plugin.diagnosis.comparison.Call` has, before it begins a special call.

    Returns:
        The staging; what ``Halves`` has, or None for each; whether it has been counted; the deadline's extra seconds.
    """
    call = Call(*read)
    group, halves, staging = call.group, None, 0
    begin(group, call.operation)
    inputs = call.outputs if call.inputs is None else call.inputs
    on_device = [tensor for tensor in (*call.outputs, *inputs) if not tensor.is_cpu] if call.start else ()
    if on_device:
        halves = _on_device(call)
    compares = group._calls.compares and call.peer is None
    if compares:
        _compare(call)
    if on_device:
        staging = stage(group, on_device[0], not call.how or halves is not None)
    if profiling.events:
        profiling.describe(call.operation, inputs, call.outputs, lambda: _for_profilers(group))
    extension = _extra_seconds(group) if group._calls.extensions else 0.0
    if halves is None:
        return staging, None, None, None, None, compares, extension
    function, operands, then, keep = halves
    # -1: keep the operation even if it is complete, to go on with it
    return 0, function, (group._handle, *operands, staging, -1), then, keep, compares, extension


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
    if not call.how or not group._direct or call.start not in ("allreduce", "reduce_to", "reduce_scatter"):
        return None
    how = group._ffi.new("mpp_reduction *", group._ffi.cast("mpp_reduction *", call.how)[0])
    counts = call.lengths[: group.size()] or [call.elements]
    if not device_reductions.suits(call.outputs[0], sum(counts) * dtype.itemsize, how):
        return None
    if call.start != "reduce_scatter":
        return device_reductions.to_ranks(group, call.keep, how, None if call.root < 0 else call.root)
    inputs, [output] = call.keep
    return device_reductions.to_one(group, inputs if len(inputs) > 1 else inputs[0], counts, output, how)


def tell_of_no_memory(group: Group, operation: str, before: int, calls: int = 1) -> None:
    """Of a call that torch has no memory for: the others learn so in its place, and the group can go on.

    Args:
        before: how many collectives the group had begun before it.
        calls: of how many collectives it consists.
    """
    while group._calls.sequence < before + calls:
        start(group, operation, group._lib.mpp_no_memory, (group._handle, 0), False, [], is_special=False)


def _compare(call: Call) -> None:
    """Meet all ranks, where the user asked for it (``compares``), and see that they are about to call the same.

    Raises:
        DistBackendError: on every rank, if they are not; says who calls what. The group stays usable.
    """
    group = call.group
    text, mine = call.signature(_mixes_devices(group))
    everybody = torch.empty(group.size(), mine.numel(), dtype=torch.uint8, device="cpu")
    operands = group._handle, mine.data_ptr(), everybody.data_ptr(), mine.numel(), 0
    name, keep = text + comparison.COMPARING, (mine, everybody)
    start(group, name, group._lib.mpp_allgather, operands, True, [], call.opts, keep, is_special=False)
    problem = comparison.disagreement(everybody)
    if problem:
        raise DistBackendError(
            f"{call.operation} (sequence number {group.sequence}, {group.label}) on rank {group.rank()}: detected "
            f"mismatch between collectives on ranks: {problem}. Nothing was sent; the group can be used again"
        )


def _mixes_devices(group: Group) -> bool:
    """Return whether ranks with CPU tensors and ranks with CUDA tensors may meet in one collective."""
    return group.communicator.has_own_collectives and not group._direct


def start(
    group: Group,
    operation: str,
    function: Callable[..., int],
    operands: tuple[Any, ...],
    sync: bool,
    tensors: list[torch.Tensor],
    opts: Any = None,
    keep: Any = None,
    peer: int | None = None,
    is_special: bool = True,
) -> Work:
    """Start an operation of mpiplus's own in C, and make its Work.

    Args:
        function, operands: of C, which returns 0 if the operation is complete, and what it takes, but for the time to
            poll.
        tensors: the results; of a put, what is put.
        keep: buffers that must live until the operation is complete.
        peer: of a message; else it is what all ranks call.
        is_special: :func:`prepare` comes first.
    """
    operands = (*operands, SLICE_NS if sync else 0)
    given = group, operation, function, operands, sync, peer, tensors, shapes_of(tensors), opts, keep, is_special
    return cast(Work, _bridge.start_function(*given))


def _for_profilers(group: Group) -> dict[str, Any]:
    return {
        "Group size": group.size(),
        "Process Group Name": group.group_name,
        "Process Group Ranks": str(group._global_ranks),
    }


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
