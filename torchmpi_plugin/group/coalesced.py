"""Operations that consist of others, one for each tensor, and become one Work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..engine import profiling
from ..engine.work import CoalescedWork, Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import ArgumentError, ArgumentTypeError, NoTensorsError, WithoutMemoryError, check
from ..tensors.overlaps import Memory
from . import forms
from .dispatching import through_dispatcher
from .group import Group
from .operands import METHODS
from .starting import reduction, tell_of_no_call

Tensors = list[torch.Tensor]


def _each(group: Group, method: str, calls: Sequence[tuple[Any, ...]], memories: Sequence[Memory]) -> list[Work]:
    """A method's calls, which make sense, with the memory of results where that is settled."""
    one = METHODS[method]
    if not memories and not forms.modes():  # those have seen the call that this is part of
        return [one.in_c(group, *call) for call in calls]
    settled: Sequence[Memory | None] = memories or [None] * len(calls)
    return [one.first_form(group, *call, memory=memory) for call, memory in zip(calls, settled, strict=True)]


def _taking_all(method: Callable[..., CoalescedWork]) -> Callable[..., Any]:
    """In all forms, of all tensors; and where torch has no memory for one, the others learn so."""
    name = method.__name__

    def first_form(group: Group, *operands: Any) -> Any:
        before = group._calls.sequence
        try:
            return method(group, *operands)
        except WithoutMemoryError as error:
            if not hasattr(dist.ProcessGroup, name):
                raise
            refusal = error
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            tell_of_no_call(group, error, name, before, len(operands[-2]))
            raise
        return through_dispatcher(group, name, first_form, operands, refusal)

    @functools.wraps(method)
    def operation(group: Any, *given: Any, **named: Any) -> Any:
        if group._show_to_modes is not None and forms.modes():
            return group._show_to_modes(group, name, *forms.read(name, given, named))
        try:
            return first_form(group, *forms.read(name, given, named))
        except (ArgumentError, ArgumentTypeError) as error:
            error.args = (f"{error} ({group.label})",)
            raise

    operation.first_form = first_form  # type: ignore[attr-defined]
    return operation


@_taking_all
def allreduce_coalesced(group: Group, tensors: Tensors, opts: Any) -> CoalescedWork:
    """``allreduce`` of each tensor, as one Work."""
    name = "all_reduce_coalesced"
    if not tensors:
        raise NoTensorsError(f"{name}: the list of tensors is empty")
    for tensor in tensors:
        arguments.check_written(check(tensor, name), name)
    for dtype in {tensor.dtype for tensor in tensors}:
        reduction(group, dtype, opts.reduceOp, name)
    memories = overlaps.results_of_all([[tensor] for tensor in tensors], name, load=True)
    how = dist.AllreduceOptions()  # of one of them; those of all are of another type
    for field in ("reduceOp", "timeout", "asyncOp"):
        if hasattr(how, field):  # older torches have no asyncOp
            setattr(how, field, getattr(opts, field))
    begin = functools.partial(_each, group, "allreduce", [([each], how) for each in tensors], memories)
    return CoalescedWork(profiling.of_several(group.known_as, "all_reduce", tensors, begin), list(tensors))


@_taking_all
def allgather_coalesced(group: Group, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> CoalescedWork:
    """``allgather`` of each input: ``output_lists[rank][i]`` receives that rank's ``inputs[i]``."""
    name = "all_gather_coalesced"
    arguments.check_count(len(output_lists), group.size(), "the list of output lists", "rank", name)
    for outputs in output_lists:
        arguments.check_count(len(outputs), len(inputs), "each output list", "input", name)
    columns = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
    for column, source in zip(columns, inputs, strict=True):
        for output in column:
            _check_pair(output, source, name)
        arguments.check_length(column[group.rank()], source.numel(), "this rank's output", name)
    sources, memories = _apart(columns, inputs, name)
    calls = [([column], [source], opts) for column, source in zip(columns, sources, strict=True)]
    begin = functools.partial(_each, group, "allgather", calls, memories)
    works = profiling.of_several(group.known_as, "all_gather", inputs, begin)
    return CoalescedWork(works, [tensor for outputs in output_lists for tensor in outputs])


def _check_pair(output: torch.Tensor, source: torch.Tensor, name: str) -> None:
    arguments.check_alike(check(output, name), check(source, name), name)
    arguments.check_written(output, name)


def _apart(results: list[Tensors], inputs: Tensors, name: str) -> tuple[Tensors, list[Memory]]:
    """Return the sources of several operations, one each, and the memory of their results where that is settled."""
    memories = overlaps.results_of_all(results, name)
    return inputs if memories else overlaps.inputs_of_all(inputs, results), memories


def _pairs(group: Group, method: str, outputs: Tensors, inputs: Tensors, opts: Any, name: str) -> CoalescedWork:
    """Operations of two tensors each, one of which has a part for each rank, as long as the other."""
    arguments.check_count(len(outputs), len(inputs), "the output list", "input", name)
    gathers, what = (True, "the output") if method == "_allgather_base" else (False, "the input")
    for pair in zip(outputs, inputs, strict=True):
        _check_pair(*pair, name)
        whole, part = pair if gathers else reversed(pair)
        arguments.check_length(whole, part.numel() * group.size(), what, name)
    for dtype in set() if gathers else {source.dtype for source in inputs}:
        reduction(group, dtype, opts.reduceOp, name)
    sources, memories = _apart([[output] for output in outputs], inputs, name)
    calls = [(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
    return CoalescedWork(_each(group, method, calls, memories), list(outputs))


@_taking_all
def allgather_into_tensor_coalesced(group: Group, outputs: Tensors, inputs: Tensors, opts: Any) -> CoalescedWork:
    """``all_gather_single`` of each pair, as one Work."""
    return _pairs(group, "_allgather_base", outputs, inputs, opts, "all_gather_into_tensor_coalesced")


@_taking_all
def reduce_scatter_tensor_coalesced(group: Group, outputs: Tensors, inputs: Tensors, opts: Any) -> CoalescedWork:
    """``reduce_scatter_single`` of each pair, as one Work."""
    return _pairs(group, "_reduce_scatter_base", outputs, inputs, opts, "reduce_scatter_tensor_coalesced")
