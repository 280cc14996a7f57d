"""Plain tensors for C in place of a call's own: of what C does not take as it is, for every operation.

What an operation reads and writes is said by its roles in operations.py. By these :class:`Method` makes a
:class:`Plain` for each tensor: memory in which its elements lie in order; and what puts the results into the user's
tensors. Then C reads the call again, and raises what is wrong with it (c_src/python/methods.c).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _bridge, operations
from ..tensors import arguments, device, overlaps
from ..tensors.arguments import ArgumentError, Finish, NotDenseError, NoTensorsError, WithoutMemoryError, check
from ..tensors.dtypes import DTYPES, PREMUL_SUM, kind_of
from ..tensors.overlaps import Memory
from . import forms, sparse
from .dispatching import through_dispatcher
from .group import Group
from .starting import reduction, tell_of_no_call

Tensors = Sequence[torch.Tensor]


class Plain(tuple):  # type: ignore[type-arg]  # a named one takes a call of Python's to make
    """A tensor and the memory of its elements, which lie there in order.

    The tensor, address, number of elements, bytes of each, rows, dtype, C's number of that (-1: none), shape and dtype
    for the flight recorder, device (None: host memory).
    """

    __slots__ = ()


def plain(tensor: torch.Tensor, buffer: torch.Tensor) -> Plain:
    """The user's ``tensor``, whose elements are or will be in the contiguous ``buffer``."""
    dtype, shape = buffer.dtype, tensor.shape
    return Plain(
        (
            *(tensor, buffer.data_ptr(), buffer.numel(), dtype.itemsize, shape[0] if shape else 1),
            *(dtype, DTYPES.get(dtype, -1), (shape, dtype), None if buffer.is_cpu else buffer.device),
        )
    )


#: What C is given (``mpp_start_plain``):
#:
#: - the group, and a method's arguments with a Plain for each tensor;
#: - what puts the results into the user's tensors, or None: they are there;
#: - the memory of these, which must live until the operation is complete: of what is read and written at once the
#:   buffer, else what is sent and what is received;
#: - the Work's tensors, or None: those of the Plains; and in how many lists its future has them.
Operands = tuple[tuple[Any, ...], Finish, Any, list[torch.Tensor] | None, int]


def _tensors_in(argument: Any, operation: str) -> list[torch.Tensor]:
    """The tensors of a list or of lists, or the one that an argument is; each checked."""
    if isinstance(argument, (list, tuple)):
        return [tensor for each in argument for tensor in _tensors_in(each, operation)]
    return [check(argument, operation)]


def _with(plains: Iterator[Plain], argument: Any) -> Any:
    """The argument with these in place of its tensors, as long as there are any."""
    if isinstance(argument, (list, tuple)):
        return [_with(plains, each) for each in argument]
    return next(plains, argument)


class Method:
    """Of a method of c10d what C calls where it cannot read a call, or is not to.

    Args:
        row: of the table of operations.

    Attributes:
        in_c: what stands in the class of groups.
    """

    def __init__(self, row: operations.Operation) -> None:
        self.row = row
        self.__name__, self.__doc__ = row.method, f"``{row.name}`` in c10d's words. Its tensors: {row.roles!r}."
        self.in_c = _bridge.Method(self, row.name, row.start, row.roles)
        first = forms.method_of(row)
        kinds = [_TYPES.get(kind) for kind in first.forms[0].kinds.values() if kind != "opts"]
        #: The types of a call's arguments that need not be looked at more closely, where there are such.
        self._types = None if None in kinds else (*kinds, *([first.options] if first.options else []))
        #: By which torch's dispatcher takes its tensors apart.
        self._dispatched = "allreduce" if row in operations.OWN else row.method
        roles, _, others = row.roles.partition(" ")
        self._out, _, self._in = roles.partition("+")
        self._has_root, self._reduces = "root" in others.split(), row.reduces
        #: The operands of a call: of the group, its arguments, where the results go, if that is settled, and whether
        #: what is written is to be apart from what is read.
        of_tensors = self._moved if self._in else self._in_place
        self.made_plain: Callable[..., Operands] = self._message if not roles or "@" in roles else of_tensors

    def __call__(self, group: Group, *given: Any, **named: Any) -> Any:
        """Carry out a call in any of the method's forms; its Work.

        Raises:
            ValueError, TypeError: it makes no sense, or fits none of the forms.
        """
        types = self._types
        if named or types is None or len(types) != len(given) or not all(map(isinstance, given, types)):
            given = tuple(forms.read(self.row.method, given, named))
        try:
            if group._show_to_modes is not None and forms.modes() and self.row not in operations.OWN:
                return group._show_to_modes(group, self.row.method, *given)
            return self.first_form(group, *given)
        except (ArgumentError, arguments.ArgumentTypeError) as error:
            error.args = (f"{error} ({group.label})",)
            raise

    def first_form(self, group: Group, *given: Any, memory: Memory | None = None) -> Any:
        """The same of the first form, which no TorchDispatchMode is to see; ``memory``: the results', if settled."""
        before = group._calls.sequence
        try:
            for apart in (False, True):  # results that lie where is read are put elsewhere
                work = _bridge.start_plain(self.in_c, *self.made_plain(group, given, memory, apart))
                if work is not NotImplemented:
                    return work
        except WithoutMemoryError as error:
            if not hasattr(dist.ProcessGroup, self._dispatched):
                raise
            refusal = error
        except NotDenseError:
            if self.row.method != "allreduce" or not sparse.are_meant(given[0]):
                raise
            return sparse.all_reduce(group, *given)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if "@" not in self.row.roles:  # all ranks call it
                tell_of_no_call(group, error, self.row.method, before)
            raise
        else:
            raise ArgumentError(f"{self.row.name}: these arguments do not go together")
        # Not in the handler: errors are to show one cause only.
        return through_dispatcher(group, self._dispatched, self.first_form, given, refusal)

    # ---- the operands, by the roles ----

    def _message(self, group: Group, given: tuple[Any, ...], *_: Any) -> Operands:
        name = self.row.name
        if not self._out or len(given[0]) != 1:  # a barrier; or C refuses it
            return (group, *given), None, None, None, 1
        tensor, writes = check(given[0][0], name), self._out.startswith("out")
        buffer, finish = arguments.writable(tensor, name) if writes else (arguments.readable(tensor), None)
        return (group, plain(tensor, buffer), *given[1:]), finish, buffer, None, 1

    def _moved(self, group: Group, given: tuple[Any, ...], memory: Memory | None, apart: bool) -> Operands:
        if self.row.method == "allgather" and len(given[1]) > 1:
            buffers, packed, finish, results = _packed(group.size(), *given[:2])
            tensors = [plain(buffer, buffer) for buffer in buffers], plain(packed, packed)
            return (group, *tensors, *given[2:]), finish, (packed, buffers), results, len(given[0])
        is_root = not self._has_root or given[-1].rootRank == group.rank()
        outs, ins = (
            _tensors_in(argument, self.row.name) if is_root or not role.endswith("[root]") else []
            for role, argument in ((self._out, given[0]), (self._in, given[1]))
        )
        has_one_result = self._out == "out"
        buffers, finish = memory or overlaps.results(outs, self.row.name, apart and has_one_result)
        sources = [arguments.readable(tensor) for tensor in ins]
        if apart and not has_one_result:
            sources = [source.detach().clone(memory_format=torch.contiguous_format) for source in sources]
        output, source = _with(map(plain, outs, buffers), given[0]), _with(map(plain, ins, sources), given[1])
        return (group, output, source, *given[2:]), finish, (sources, buffers), None, 1

    def _in_place(self, group: Group, given: tuple[Any, ...], memory: Memory | None, _: bool) -> Operands:
        (tensors, opts), at_root = given, True
        name, reduces = self.row.name, self._reduces
        if self._has_root:
            at_root = opts.rootRank == group.rank()
        if (len(tensors) > 1 and name == "all_reduce") or (len(tensors) != 1 and name == "broadcast"):
            return self._of_several(group, tensors, opts, at_root)
        if len(tensors) != 1:  # C refuses it
            return (group, *given), None, None, None, 1
        tensor = check(tensors[0], name)
        if memory is not None:
            [buffer], finish = memory
        elif not self._has_root or at_root == reduces:  # a root's result, or what others receive from it
            buffer, finish = arguments.writable(tensor, name, reduces)
        else:
            buffer, finish = arguments.readable(tensor), None
        return (group, plain(tensor, buffer), opts), finish, buffer, None, 1

    def _of_several(self, group: Group, tensors: Tensors, opts: Any, at_root: bool) -> Operands:
        """A rank's tensors, which become one: the one that is sent, or their sum; all receive the result."""
        name, finish = self.row.name, None
        if self.row.reduces:
            tensor = buffer = _joined(group, tensors, opts.reduceOp)
            others: Tensors = tensors
        else:
            tensor, others = _one_of(tensors, opts.rootTensor, name)
            buffer, finish = (arguments.readable(tensor), None) if at_root else arguments.writable(tensor, name)
        finish = _copied(buffer, others, name, finish)
        return (group, plain(tensor, buffer), opts), finish, buffer, list(tensors), 1


_TYPES: dict[str, Any] = {"tensor": torch.Tensor, "list": (list, tuple), "int": int}


# ---- several tensors for a rank, which c10d's oldest operations take: what gloo makes of them ----


def _check_alike(tensors: Tensors, like: torch.Tensor, operation: str) -> None:
    for tensor in tensors:
        arguments.check_alike(check(tensor, operation), check(like, operation), operation)
        if tensor.shape != like.shape:
            raise ArgumentError(
                f"{operation}: a rank's tensors must have one shape, not {tuple(like.shape)} and {tuple(tensor.shape)}"
            )


def _one_of(tensors: Tensors, index: int, operation: str) -> tuple[torch.Tensor, Tensors]:
    """The tensor that the options name by their ``rootTensor``, and the others."""
    if not tensors:
        raise NoTensorsError(f"{operation}: the list of tensors is empty")
    if not 0 <= index < len(tensors):
        raise ArgumentError(f"{operation}: invalid root tensor: {index}; this rank has {len(tensors)}")
    tensor = check(tensors[index], operation)
    if len(tensors) == 1:
        return tensor, ()
    _check_alike(tensors, tensor, operation)
    return tensor, [*tensors[:index], *tensors[index + 1 :]]


def _copied(buffer: torch.Tensor, others: Tensors, operation: str, finish: Finish) -> Finish:
    """``finish``, and then the result copied from the memory that it is in to other tensors."""
    for other in others:
        arguments.writable(other, operation)  # an error now if it is none that can be written to
    return arguments.all_of([finish, *(functools.partial(device.copy, buffer, other.detach()) for other in others)])


def _joined(group: Group, tensors: Tensors, op: Any) -> torch.Tensor:
    """The tensors of a rank reduced to one, still to be reduced with those of others. AVG divides by the ranks only."""
    _check_alike(tensors, tensors[0], "all_reduce")
    if not tensors[0].is_cpu:
        raise ArgumentError(f"all_reduce: mpiplus takes one CUDA tensor per rank, not {len(tensors)}")
    if kind_of(op) == PREMUL_SUM:
        raise ArgumentError(f"all_reduce: PREMUL_SUM takes one tensor per rank, not {len(tensors)}")

    ffi, reduced = group._ffi, reduction(group, tensors[0].dtype, op, "all_reduce")
    reduced.divisor = 1
    sources = [arguments.readable(tensor.detach()) for tensor in tensors]
    joint = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    addresses = ffi.new("void *[]", [ffi.cast("void *", source.data_ptr()) for source in sources])
    group._lib.mpp_reduce(reduced, ffi.cast("void *", joint.data_ptr()), addresses, len(sources), joint.numel())
    return joint


def _packed(
    size: int, output_lists: Sequence[Tensors], inputs: Tensors
) -> tuple[list[torch.Tensor], torch.Tensor, Finish, list[torch.Tensor]]:
    """An all_gather of several tensors for each of ``size`` ranks as one of one tensor.

    Each of the output lists, one for each input, receives every rank's inputs, the ranks one after the other.

    Returns:
        Where it gathers, and what; what then puts the results in place, and these.
    """
    name = "all_gather"
    _check_alike(inputs, inputs[0], name)
    if len(output_lists) != len(inputs):
        raise ArgumentError(
            f"{name}: there must be as many output lists as inputs, {len(inputs)}, not {len(output_lists)}"
        )
    for outputs in output_lists:
        if len(outputs) != len(inputs) * size:
            raise ArgumentError(
                f"{name}: a list must have as many outputs as all ranks have inputs, {len(inputs) * size}, not "
                f"{len(outputs)}"
            )
        _check_alike(outputs, inputs[0], name)
    length = inputs[0].numel()
    all_of_them = inputs[0].detach().new_empty(len(inputs) * length)
    for i, tensor in enumerate(inputs):
        all_of_them[i * length : (i + 1) * length].copy_(arguments.readable(tensor.detach()).reshape(-1))
    buffers = [all_of_them.new_empty(all_of_them.shape) for _ in range(size)]
    parts = [part.reshape(inputs[0].shape) for buffer in buffers for part in buffer.split(length)] if length else []
    # List by list, as gloo does: where lists overlap, that is seen.
    finishes = [_copied(part, [outputs[i]], name, None) for outputs in output_lists for i, part in enumerate(parts)]
    results = [output for outputs in output_lists for output in outputs]
    return buffers, all_of_them, arguments.all_of(finishes), results


#: By their names in c10d; those that consist of others are in coalesced.py.
METHODS = {row.method: Method(row) for row in operations.ROWS if row.start}
