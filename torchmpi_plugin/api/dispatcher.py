"""A group behind torch's dispatcher, before torch 2.15: the operators ``torch.ops.c10d.*``, and what they are good for.

torch's front end calls the methods of a process group in Python directly. Two ways lead through the dispatcher instead:
the operators themselves, which programs and C++ may call, and calls that a TorchDispatchMode such as CommDebugMode is
to see. There torch's own kernels ask the group for a backend in C++, which ours has from torch 2.15 on only. Before
that a kernel in Python stands in front of each: it hands over to a group of ours, and calls torch's own for all others.
That costs these some 30 us for each operation, so the kernels are put there when a program first needs them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .. import operations, torch_internals, torch_operators
from ..group import work_registry
from ..group.forms import FORMS
from ..group.process_group import ProcessGroupMPI
from ..tensors.arguments import ArgumentError
from ..tensors.dtypes import PREMUL_SUM

#: The methods of a group, by the names of their operators.
OPERATORS = {row.operator or f"{row.method}_": row.method for row in operations.ROWS if row.operator is not None}
_UNSET_MS = -1


class _Issued(threading.local):
    """The Works of this thread's operations, while somebody asks: kept any longer, they keep their tensors."""

    works: list[Any] | None = None

    def note(self, work: Any) -> Any:
        """An operation has begun; None: and is over, which its caller needs no Work to know."""
        if self.works is not None and work is not None:
            self.works.append(work)
        return work

    @contextlib.contextmanager
    def asked(self) -> Iterator[list[Any]]:
        """Within, the list has the Works of what begins; what torch's dispatcher returns knows less of them."""
        before, self.works = self.works, []
        try:
            yield self.works
        finally:
            self.works = before


issued = _Issued()


#: Of the ranks that still take part in DDP's ``join()``: begun in the forward pass, waited for in the backward pass.
_SET_FORWARD_WORK = f"{torch_internals.C10D}:Reducer._set_forward_pass_work_handle"


def _held_by(take: Callable[..., None]) -> Callable[..., None]:
    """The same for a Work made in Python, which C++ keeps whole: nobody else keeps it until the backward pass."""

    @functools.wraps(take)
    def take_held(reducer: Any, work: Any, *how: Any) -> None:
        take(reducer, work if type(work) is dist.Work else work_registry.hold(work), *how)

    return take_held


torch_internals.put(_SET_FORWARD_WORK, _held_by(torch_internals.find(_SET_FORWARD_WORK)))


# ---- from an operator to the method ----


def _field(name: str, value: Any) -> Any:
    """An operator's argument as the field of the options."""
    if name == "reduce_op":
        kind = dist.ReduceOp.RedOpType(value.op())
        if kind == PREMUL_SUM:
            raise ArgumentError(f"PREMUL_SUM: the operators of torch {torch.__version__} do not tell the factor")
        return kind
    return timedelta(milliseconds=value) if name == "timeout" else value


#: Arguments of operators that are fields of the options.
_FIELDS = {
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "reduce_op": "reduceOp",
    "sparse_indices": "sparseIndices",
    "device_ids": "device_ids",
    "async_op": "asyncOp",
    "asyncOp": "asyncOp",
    "timeout": "timeout",
}


def _begin(group: ProcessGroupMPI, operator: str, schema: Any, arguments: Sequence[Any]) -> Any:
    """Call, as an operator's kernel, a group of ours; return the Work."""
    method = FORMS[OPERATORS[operator]]
    opts = None if method.options is None else method.options()
    operands = []
    for i, described in enumerate(schema.arguments):
        value = arguments[i] if i < len(arguments) else described.default_value
        if described.name in _FIELDS:
            if value is not None and not (described.name == "timeout" and value == _UNSET_MS):
                setattr(opts, _FIELDS[described.name], _field(described.name, value))
        elif described.name != "process_group" and operator != "barrier":  # whose tensor only finds the kernel
            operands.append(value)
    operands += [] if opts is None else [opts]
    return getattr(ProcessGroupMPI, OPERATORS[operator]).first_form(group, *operands)


def _put(namespace: str, operator: str, ours: Callable[..., Any]) -> None:
    """Have an operator on a group of ours call ``ours``: with the schema, torch's kernel, the group, the arguments."""

    def make(schema: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        names = [argument.name for argument in schema.arguments]
        place = next(place for place, name in enumerate(names) if name in ("process_group", "group_name"))

        def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
            torchs = functools.partial(original, keys, *arguments, **named)
            group = torch_operators.group_of_operator(arguments[place])
            return ours(schema, torchs, group, *arguments) if isinstance(group, ProcessGroupMPI) else torchs()

        return kernel

    torch_operators.put_before_kernels(namespace, operator, make)


def _carry_out(operator: str, schema: Any, _: Any, group: ProcessGroupMPI, *arguments: Any) -> Any:
    held = work_registry.hold(issued.note(_begin(group, operator, schema, arguments))).boxed()
    return (arguments[0], held) if len(schema.returns) > 1 else held


def _monitored_barrier(_schema: Any, _torchs: Any, group: ProcessGroupMPI, *arguments: Any) -> None:
    *_, timeout, wait_all_ranks = arguments
    group.monitored_barrier(None if timeout == _UNSET_MS else timedelta(milliseconds=timeout), wait_all_ranks)


@functools.cache
def install() -> None:
    """Put the kernels in front of torch's."""
    for operator in OPERATORS:
        _put("c10d", operator, functools.partial(_carry_out, operator))
    _put("c10d", "monitored_barrier_", _monitored_barrier)


# ---- functional operators that ask the group for a backend ----


def _all_gather_out(_schema: Any, torchs: Callable[[], Any], *_: Any) -> Any:
    install()  # torch's own kernel calls an operator
    return torchs()


def _batch_p2p(_schema: Any, _torchs: Any, group: ProcessGroupMPI, *arguments: Any) -> list[torch.Tensor]:
    results = []
    for name, peer, tag, tensor in zip(*arguments[:4], strict=True):
        sends = name == "isend"
        work = (group.send if sends else group.recv)([tensor], peer, tag)
        result = tensor.new_empty(0) if sends else tensor
        work_registry.register(result, work_registry.hold(work))  # which wait_tensor of the result waits for
        results.append(result)
    return results


@functools.cache
def install_functional() -> None:
    """The kernels of functional operators that C++ cannot carry out for a group in Python."""
    _put("_c10d_functional", "all_gather_into_tensor_out", _all_gather_out)
    _put("_c10d_functional", "batch_p2p_ops", _batch_p2p)


def attach(group: ProcessGroupMPI) -> None:
    """Let torch's operators work with a group that has no backend in C++, as far as this torch allows."""
    if torch_operators.operators_tell_the_reduction():
        install_functional()
        group._allow_operators, group._show_to_modes = install, show_to_modes


# ---- from the method to the operator ----


class _Caught(Exception):  # noqa: N818 - no error
    """An operator as C++ called it."""

    def __init__(self, function: Any, arguments: Any, named: Any) -> None:
        self.function, self.arguments, self.named = function, arguments, named


class _Catching(TorchDispatchMode):
    """Keeps C++ from calling an operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise _Caught(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))  # barrier makes a tensor to find the kernel by


#: A group with torch's own methods, each of which calls an operator.
_unknown: Callable[[int, int], Any] = functools.cache(dist.ProcessGroup)


def _operator_of(name: str, operands: tuple[Any, ...]) -> _Caught:
    """The operator by which torch's own group carries out a method: only C++ can make all of its arguments."""
    try:
        with _Catching():
            getattr(dist.ProcessGroup, name)(_unknown(0, 1), *operands)
    except _Caught as caught:
        return caught
    raise RuntimeError(f"torch {torch.__version__} calls no operator for {name}")


def show_to_modes(group: ProcessGroupMPI, name: str, *operands: Any) -> Any:
    """Carry out a method by torch's operator, so that the TorchDispatchModes of this thread see it; its Work."""
    if torch_operators.hides_from_modes() or not hasattr(dist.ProcessGroup, name):
        return getattr(type(group), name).first_form(group, *operands)
    call = _operator_of(name, operands)
    boxed = group.boxed()
    arguments = [boxed if torch_operators.is_group(argument) else argument for argument in call.arguments]
    with issued.asked() as works:
        returned = call.function(*arguments, **call.named)
    if works:
        return works[-1]
    last = returned[-1] if isinstance(returned, (list, tuple)) else returned
    return dist.Work.unbox(last)  # a mode has done something else
