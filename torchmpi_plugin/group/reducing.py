"""Reductions: all_reduce, reduce and reduce_scatter, in the forms and under the names that c10d knows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..diagnosis.comparison import Call
from ..diagnosis.flight_recorder import tensors_in
from ..engine.coalesced import CoalescedWork
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import NoTensorsError, blocks_of, bytes_of, check, readable, rows_of, single, writable
from ..tensors.overlaps import Memory
from . import device_reductions, several, sparse
from .group import ProcessGroupMPI as Group
from .messages import each, first_of
from .starting import Halves, collective, reduction

Tensors = list[torch.Tensor]


def allreduce(group: Group, tensors: Tensors, opts: Any) -> Any:
    """Reduce every rank's tensor elementwise, in place, to bitwise the same result everywhere.

    bfloat16, float16 and float8 are summed in float32 and rounded once. AVG of integers truncates;
    SUM of bool is "or". Several tensors for a rank, all alike, are reduced first, and all receive the result.
    """
    if sparse.are_meant(tensors):
        return sparse.all_reduce(group, tensors, opts)
    if len(tensors) > 1:
        several.check_together(tensors, opts.reduceOp)
        how = reduction(group, tensors[0].dtype, opts.reduceOp, "all_reduce")
        joint = several.joined(group, tensors, how)
        return _allreduce(group, joint, opts, receivers=tensors)
    return _allreduce(group, single(tensors, "all_reduce"), opts)


def _allreduce(
    group: Group,
    tensor: torch.Tensor,
    opts: Any,
    memory: Memory | None = None,
    receivers: Sequence[torch.Tensor] = (),
) -> Work:
    """
    Args:
        memory: where the result goes and what puts it into the tensor, if that is settled.
        receivers: tensors that the result is copied to; where there are some, ``tensor`` is nobody's.
    """
    name = "all_reduce"
    how = reduction(group, tensor.dtype, opts.reduceOp, name)
    if memory is None:
        buffer, finish = writable(tensor, name, load=True)
    else:
        [buffer], finish = memory
    finish, results = several.copied(buffer, receivers, name, finish), list(receivers) or [tensor]
    address, count = buffer.data_ptr(), buffer.numel()
    operands, call = (address, address, count, how), Call(tensor, [count], opts.reduceOp)
    halves = _on_device(group, buffer, how)
    return collective(
        group, name, group._lib.mpp_allreduce, operands, call, results, opts, None, finish, buffer, halves=halves
    )


def _on_device(group: Group, buffer: torch.Tensor, how: Any, root: int | None = None) -> Callable[[], Halves] | None:
    """What reduces to all ranks, or to the root, where the tensors lie; None: C does, in host memory."""
    if not (group._direct and device_reductions.suits(buffer, bytes_of(buffer), how)):
        return None
    return functools.partial(device_reductions.to_ranks, group, buffer, how, root)


def allreduce_coalesced(group: Group, tensors: Tensors, opts: Any) -> CoalescedWork:
    """``allreduce`` of each tensor, as one Work."""
    name = "all_reduce_coalesced"
    if not tensors:
        raise NoTensorsError(f"{name}: the list of tensors is empty")
    for tensor in tensors:
        reduction(group, check(tensor, name).dtype, opts.reduceOp, name)
    memories: Sequence[Memory | None] = overlaps.results_of_all([[tensor] for tensor in tensors], name, load=True) or [
        None
    ] * len(tensors)
    works = [_allreduce(group, tensor, opts, memory) for tensor, memory in zip(tensors, memories, strict=True)]
    return CoalescedWork(works, list(tensors))


def reduce(group: Group, tensors: Tensors, opts: Any) -> Work:
    """Reduce every rank's tensor elementwise into the root's; the others' stay as they are."""
    name = "reduce"
    tensor = single(tensors, name)
    several.one_of(tensors, opts.rootTensor, name)
    root = arguments.check_root(opts.rootRank, group.size(), name)
    how = reduction(group, tensor.dtype, opts.reduceOp, name)
    buffer, finish = writable(tensor, name, load=True) if root == group.rank() else (readable(tensor), None)
    address, count = buffer.data_ptr(), buffer.numel()
    operands, call = (address, address, count, how, root), Call(tensor, [count], opts.reduceOp, root)
    halves = _on_device(group, buffer, how, root)
    return collective(
        group, name, group._lib.mpp_reduce_to, operands, call, [tensor], opts, None, finish, buffer, halves=halves
    )


def reduce_scatter(group: Group, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
    """Reduce entry ``r`` of every rank's input list into rank ``r``'s tensor; entries may differ in length."""
    name, rank = "reduce_scatter", group.rank()
    output, inputs = single(output_tensors, name), first_of(input_tensors, name)
    arguments.check_count(len(inputs), group.size(), "the input list", name)
    for item in inputs:
        arguments.check_alike(check(item, name), output, name)
    arguments.check_numel(output, inputs[rank].numel(), "the output", name)
    sources = [readable(item) for item in inputs]
    counts = [source.numel() for source in sources]
    memory = overlaps.result(output, name, sources, rank, sources[rank].data_ptr())
    return _reduce_blocks(group, name, output, sources, blocks_of(sources)[0], counts, False, opts, memory)


def _reduce_scatter_base(group: Group, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    """Reduce block ``r`` of every rank's input, of ``size`` equal blocks, into rank ``r``'s output."""
    return _reduce_scatter_into(group, output, input, opts)


def _reduce_scatter_into(
    group: Group, output: torch.Tensor, input: torch.Tensor, opts: Any, memory: Memory | None = None
) -> Work:
    name = "reduce_scatter_tensor"
    arguments.check_alike(check(input, name), check(output, name), name)
    arguments.check_numel(input, output.numel() * group.size(), "the input", name)
    source, counts = readable(input), [output.numel()] * group.size()
    addresses, _ = rows_of(source, counts)
    memory = memory or overlaps.result(output, name, [source], 0, addresses[group.rank()])
    return _reduce_blocks(group, name, output, source, addresses, counts, True, opts, memory)


def _reduce_blocks(
    group: Group,
    name: str,
    output: torch.Tensor,
    sources: Any,
    addresses: list[int],
    counts: list[int],
    flat: bool,
    opts: Any,
    memory: Memory,
) -> Work:
    how = reduction(group, output.dtype, opts.reduceOp, name)
    [buffer], finish = memory
    halves = None
    if group._direct and device_reductions.suits(output, sum(counts) * output.element_size(), how):
        halves = functools.partial(device_reductions.to_one, group, sources, counts, buffer, how)
    operands, call = (addresses, buffer.data_ptr(), counts, flat, how), Call(output, counts, opts.reduceOp)
    inputs, keep = tensors_in(sources), (sources, buffer)
    return collective(
        group, name, group._lib.mpp_reduce_scatter, operands, call, [output], opts, None, finish, keep, inputs, halves
    )


def reduce_scatter_single_coalesced(group: Group, outputs: Tensors, inputs: Tensors, opts: Any) -> CoalescedWork:
    """``reduce_scatter_single`` of each pair, as one Work."""
    name = "reduce_scatter_tensor_coalesced"
    return each(group._reduce_scatter_base, _reduce_scatter_into, group, outputs, inputs, opts, name)
