"""From the operands of an operation to its Work: what is checked and told of a call that Python has read.

C counts, records and starts it, and makes the Work: ``mpp_start_operation`` of c_src/python/bridge.c, as it does with
calls that it reads itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _bridge, torch_internals
from ..diagnosis import comparison
from ..diagnosis.flight_recorder import shapes_of
from ..engine import activity, profiling
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..errors import DistBackendError
from ..mpi import runtime
from ..tensors import arguments, device
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, kind_of, premul_factor
from .group import ProcessGroupMPI as Group

#: A peer: whoever sends first.
ANY_SOURCE = -1
#: What is said of a group at an end that is not its own, and what to do about it.
ENDED, FINALIZED = "has ended with the program", "has ended as the program called MPI_Finalize"
_CURES = {
    ENDED: "exit handlers run last registered first: register this one after import torch",
    FINALIZED: "call that after the last operation, or leave it to mpiplus",
}


class Halves(NamedTuple):
    """An operation in two halves, of which the first is an exchange.

    Attributes:
        function, operands: of the first half.
        then: begins the second half, when the first one is complete; returns C's handle, 0 if it is complete.
        keep: tensors that must live until the operation is complete.
    """

    function: Callable[..., int]
    operands: tuple[Any, ...]
    then: Callable[[], int]
    keep: Any


def begin(group: Group, operation: str) -> None:
    """Check that an operation may start here and now."""
    if runtime.forked:
        runtime.refuse_in_forked_child(operation)
    if group._calls.broken is not None:
        cure = next((cure for end, cure in _CURES.items() if end in group._calls.broken), "make a new group")
        raise DistBackendError(f"{operation}: {group._calls.broken}; {cure}")
    activity.last = group, operation
    if group._calls.coalescing is not None and torch_internals.is_over(group._coalescing_block):
        group._forget_coalesced()
    if group._engine.only_thread is not None:
        group._engine.check_thread(operation)
    if profiling.wanted():
        profiling.begin(operation)


def stage(group: Group, tensor: torch.Tensor, moves: bool) -> int:
    """What C needs to know about an operation on CUDA tensors, just before it starts; 0 for others.

    Args:
        tensor: one of them.
        moves: the operation reduces nothing, so MPI may be able to do it on the device.
    """
    if tensor.is_cpu:
        return 0
    return device.stage(group._lib, group._ffi, tensor, moves and group._direct, group._communicator.place.local_rank)


def collective(
    group: Group,
    operation: str,
    function: Callable[..., int],
    operands: tuple[Any, ...],
    call: comparison.Call,
    tensors: list[torch.Tensor],
    opts: Any,
    sync: bool | None = None,
    finish: arguments.Finish = None,
    keep: Any = None,
    inputs: Sequence[torch.Tensor] | None = None,
    halves: Callable[[], Halves] | None = None,
) -> Work:
    """Start what all ranks call, and make its Work. Arguments are those of :func:`start` but for these:

    Args:
        operands: without the group and the staging, which is that of ``call.tensor``, if there is one.
        call: what all ranks must agree on.
        sync: None: as the options say.
        halves: makes of the operation one in two halves; where it is to reduce on the device.
    """
    sync = not opts.asyncOp if sync is None else sync
    begin(group, operation)
    if group._calls.compares:
        _compare(group, operation, call, opts)
    then = None
    if halves is not None:
        function, operands, then, keep = halves()
    staging = () if call.tensor is None else (stage(group, call.tensor, call.op is None or then is not None),)
    operands, counted = (group._handle, *operands, *staging), bool(group._calls.compares)
    group.begun += 1
    return start(group, operation, function, operands, sync, tensors, opts, finish, keep, None, then, inputs, counted)


def telling_of_no_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of a collective: where torch has no memory for it on the device, the others learn so, and the group can go on."""

    @functools.wraps(method)
    def guarded(self: Group, *operands: Any, **named: Any) -> Any:
        before = self.begun
        try:
            return method(self, *operands, **named)
        except torch.OutOfMemoryError:
            calls = len(operands[0]) if method.__name__.endswith("_coalesced") else 1
            while self.begun < before + calls:  # in the place of each
                self.begun += 1
                start(self, method.__name__, self._lib.mpp_no_memory, (self._handle, 0), False, [], None)
            raise

    return guarded


def _compare(group: Group, operation: str, call: comparison.Call, opts: Any) -> None:
    """Where the user asked for it (``compares``): meet all ranks, and see that they are about to call the same.

    Raises:
        DistBackendError: on every rank, if they are not; says who calls what. The group stays usable.
    """
    text = call.describe(operation, with_device=not (call.as_messages or _mixes_devices(group)))
    mine = comparison.record(text, call, group.size())
    everybody = torch.empty(group.size(), mine.numel(), dtype=torch.uint8, device="cpu")
    operands = group._handle, mine.data_ptr(), everybody.data_ptr(), mine.numel(), 0
    name, keep = text + comparison.COMPARING, (mine, everybody)
    start(group, name, group._lib.mpp_allgather, operands, True, [], opts, None, keep)
    problem = comparison.disagreement(everybody)
    if problem:
        raise DistBackendError(
            f"{operation} (sequence number {group.sequence}, {group.label}) on rank {group.rank()}: detected "
            f"mismatch between collectives on ranks: {problem}. Nothing was sent; the group can be used again"
        )


def _mixes_devices(group: Group) -> bool:
    """Whether ranks with CPU tensors and ranks with CUDA tensors may meet in one collective."""
    return group.communicator.has_own_collectives and not group._direct


def start(
    group: Group,
    operation: str,
    function: Callable[..., int],
    operands: tuple[Any, ...],
    sync: bool,
    tensors: list[torch.Tensor],
    opts: Any,
    finish: arguments.Finish = None,
    keep: Any = None,
    peer: int | None = None,
    then: Callable[[], int] | None = None,
    inputs: Sequence[torch.Tensor] | None = None,
    counted: bool = False,
) -> Work:
    """Start an operation in C, and make its Work. :func:`begin` comes first.

    Args:
        function, operands: of C, which returns 0 if the operation is complete, and what it takes, but for the time to
            poll.
        tensors: the results; of a send, what is sent.
        finish: puts the result into the user's tensors.
        keep: buffers that must live until the operation is complete.
        peer: of a message.
        then: see :class:`Halves`.
        inputs: what the results are made of, where that is not themselves.
        counted: the comparison of the calls has counted this one.
    """
    calls = group._calls
    if profiling.events:
        profiling.describe(operation, tensors if inputs is None else inputs, tensors, lambda: _for_profilers(group))
    outputs = shapes_of(tensors)
    made_of = outputs if inputs is None else shapes_of(inputs)
    extension = _extra_seconds(group) if calls.extensions else 0.0
    # -1: keep the operation even if it is complete, to ask it where the message came from, or to go on with it
    operands = (*operands, -1 if peer == ANY_SOURCE or then is not None else SLICE_NS if sync else 0)
    call = group, calls, operation, function, operands, sync, peer
    work: Work = _bridge.start(*call, tensors, opts, finish, keep, then, made_of, outputs, counted, extension)
    if calls.extensions:
        for each in calls.extensions:
            each.first = each.first or work
        _extra_seconds(group)  # forgets those that are over
    if profiling.events:
        profiling.end(work)
    if calls.coalescing is not None:
        calls.coalescing.append((work, [] if operation == "send" else tensors))
    return work


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
    key = dtype, int(kind)  # the enum itself is ten times slower to look up
    how = group._reductions.get(key)
    if how is not None:
        return how
    code, operation_code = DTYPES.get(dtype), OPERATIONS.get(kind)
    if code is None or operation_code is None:
        raise arguments.ArgumentTypeError(f"{operation}: {dtype} cannot be reduced with {kind}")
    boolean_sum = dtype is torch.bool and kind in (AVG, PREMUL_SUM)
    if boolean_sum or not group._lib.mpp_reduction_supported(code, operation_code):
        raise arguments.ArgumentError(f"{operation}: {kind.name} makes no sense for {dtype}")
    how = group._ffi.new("mpp_reduction *", {"dtype": code, "op": operation_code, "premul": 1.0, "divisor": 1})
    if kind == AVG:
        how.divisor = group.size()
    if kind == PREMUL_SUM:
        how.has_premul, how.premul = 1, premul_factor(op)
    else:
        group._reductions[key] = how
    return how
