"""Moving data: barrier, broadcast, and every rank's own part to or from the others, in all their forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..diagnosis.comparison import Call
from ..engine.coalesced import CoalescedWork
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import ArgumentError, blocks_of, bytes_of, check, readable, rows_of, single, writable
from ..tensors.overlaps import Memory
from . import several
from .group import ProcessGroupMPI as Group
from .messages import each, exchange, first_of
from .starting import collective

Tensors = list[torch.Tensor]
Parts = Sequence[torch.Tensor | None]


def barrier(group: Group, opts: Any) -> Work:
    """Wait until every rank has come."""
    return collective(
        group, "barrier", group._lib.mpp_barrier, (), Call(), [], opts, not getattr(opts, "asyncOp", True)
    )


def broadcast(group: Group, tensors: Tensors, opts: Any) -> Work:
    """Copy the root's tensor to every rank's; the root's own is only read.

    Of several tensors the root gives number ``rootTensor`` to all.
    """
    tensor, others = several.one_of(tensors, opts.rootTensor, "broadcast")
    root = arguments.check_root(opts.rootRank, group.size(), "broadcast")
    buffer, finish = (readable(tensor), None) if root == group.rank() else writable(tensor, "broadcast")
    finish = several.copied(buffer, others, "broadcast", finish)
    operands, call = (buffer.data_ptr(), bytes_of(buffer), root), Call(tensor, [tensor.numel()], root=root)
    return collective(
        group, "broadcast", group._lib.mpp_broadcast, operands, call, list(tensors), opts, None, finish, buffer
    )


def allgather(group: Group, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
    """Every rank's tensor into the output list; ranks may have different shapes.

    Of several tensors for a rank, all alike, each output list receives those of all ranks.
    """
    if len(input_tensors) > 1:
        buffers, packed, then, results = several.packed(group.size(), output_tensors, input_tensors)
        work = _allgather(group, buffers, packed, opts, None, then, results)
        work._lists = len(output_tensors)
        return work
    return _allgather(group, first_of(output_tensors, "all_gather"), single(input_tensors, "all_gather"), opts)


def _allgather(
    group: Group,
    outputs: Tensors,
    tensor: torch.Tensor,
    opts: Any,
    memory: Memory | None = None,
    then: arguments.Finish = None,
    results: Tensors | None = None,
) -> Work:
    """
    Args:
        memory: where the results go and what puts them into the outputs, if that is settled.
        then: what puts it into the ``results``, where the outputs are nobody's.
    """
    name, rank = "all_gather", group.rank()
    arguments.check_count(len(outputs), group.size(), "the output list", name)
    for output in outputs:
        arguments.check_alike(check(output, name), tensor, name)
    arguments.check_numel(outputs[rank], tensor.numel(), "this rank's output", name)
    buffers, finish = memory or overlaps.results(outputs, name)
    blocks = blocks_of(buffers)
    [source] = overlaps.inputs([readable(tensor)], buffers, 0, blocks[0][rank])
    operands = source.data_ptr(), *blocks
    call = Call(tensor, send=[bytes_of(source)] * group.size(), receive=blocks[1])
    finish, keep = arguments.all_of([finish, then]), (source, buffers)
    outputs = list(outputs) if results is None else results
    return collective(
        group, name, group._lib.mpp_allgather_list, operands, call, outputs, opts, None, finish, keep, [tensor]
    )


def _allgather_base(group: Group, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    """Every rank's tensor, one after the other, into one output of ``size`` times its elements."""
    return _allgather_into(group, output, input, opts)


def _allgather_into(
    group: Group, output: torch.Tensor, input: torch.Tensor, opts: Any, memory: Memory | None = None
) -> Work:
    name = "all_gather_into_tensor"
    arguments.check_alike(check(output, name), check(input, name), name)
    arguments.check_numel(output, input.numel() * group.size(), "the output", name)
    [buffer], finish = memory or overlaps.results([output], name)
    place = buffer.data_ptr() + group.rank() * bytes_of(input)
    [source] = overlaps.inputs([readable(input)], [buffer], 0, place)
    operands, call = (source.data_ptr(), buffer.data_ptr(), bytes_of(source)), Call(input, [input.numel()])
    return collective(
        group, name, group._lib.mpp_allgather, operands, call, [output], opts, None, finish, (source, buffer), [input]
    )


def all_gather_single_coalesced(group: Group, outputs: Tensors, inputs: Tensors, opts: Any) -> CoalescedWork:
    """``all_gather_single`` of each pair, as one Work."""
    name = "all_gather_into_tensor_coalesced"
    return each(group._allgather_base, _allgather_into, group, outputs, inputs, opts, name)


def allgather_coalesced(group: Group, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> CoalescedWork:
    """``allgather`` of each input: ``output_lists[rank][i]`` receives that rank's ``inputs[i]``."""
    name = "all_gather_coalesced"
    arguments.check_count(len(output_lists), group.size(), "the output lists", name)
    for outputs in output_lists:
        arguments.check_count(len(outputs), len(inputs), "each output list", name)
    columns = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
    for tensor in itertools.chain(inputs, *columns):
        check(tensor, name)
    memories: Sequence[Memory | None] = overlaps.results_of_all(columns, name)
    if not memories:
        inputs, memories = overlaps.inputs_of_all(inputs, columns), [None] * len(inputs)
    works = [
        _allgather(group, column, tensor, opts, memory)
        for column, tensor, memory in zip(columns, inputs, memories, strict=True)
    ]
    return CoalescedWork(works, [tensor for outputs in output_lists for tensor in outputs])


def _list_of_root(group: Group, given: Any, tensor: torch.Tensor, root: int, name: str, side: str) -> Tensors:
    """The tensors that the root alone gives, one for each rank and each like ``tensor``; elsewhere none."""
    if root != group.rank():
        if given and first_of(given, name):
            raise ArgumentError(f"{name}: only the root may pass an {side} list")
        return []
    items = list(first_of(given, name))
    arguments.check_count(len(items), group.size(), f"the root's {side} list", name)
    for item in items:
        arguments.check_alike(check(item, name), tensor, name)
        arguments.check_numel(item, tensor.numel(), f"each {side}", name)
    return items


def _only_for(root: int, tensor: torch.Tensor, size: int) -> list[torch.Tensor | None]:
    """What goes to or comes from the root alone."""
    return [tensor if rank == root else None for rank in range(size)]


def gather(group: Group, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
    """Every rank's tensor into the root's output list."""
    name, size = "gather", group.size()
    root = arguments.check_root(opts.rootRank, size, name)
    tensor = single(input_tensors, name)
    outputs = _list_of_root(group, output_tensors, tensor, root, name, "output")
    buffers, finish = overlaps.results(outputs, name)
    place = buffers[root].data_ptr() if buffers else 0
    [source] = overlaps.inputs([readable(tensor)], buffers, 0, place)
    send = _only_for(root, source, size)
    receive: Parts = buffers or [None] * size
    blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
    return exchange(group, name, *blocks, outputs or [tensor], opts, finish, keep, root)


def gather_single(group: Group, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    """Every rank's tensor, one after the other, into the root's output; the others' output is not looked at."""
    name, size = "gather_single", group.size()
    root = arguments.check_root(opts.rootRank, size, name)
    source = readable(check(input, name))
    if root != group.rank():
        send = blocks_of(_only_for(root, source, size))
        return exchange(group, name, send, blocks_of([None] * size), [input], opts, None, (source, None), root)
    arguments.check_alike(check(output, name), input, name)
    arguments.check_numel(output, input.numel() * size, "the root's output", name)
    buffer, finish = writable(output, name)
    receive = rows_of(buffer, [input.numel()] * size)
    [source] = overlaps.inputs([source], [buffer], 0, receive[0][root])
    send = blocks_of(_only_for(root, source, size))
    return exchange(group, name, send, receive, [output], opts, finish, (source, buffer), root)


def scatter(group: Group, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
    """Entry ``r`` of the root's input list into rank ``r``'s tensor."""
    name, size = "scatter", group.size()
    root = arguments.check_root(opts.rootRank, size, name)
    tensor = single(output_tensors, name)
    inputs = _list_of_root(group, input_tensors, tensor, root, name, "input")
    sources = [readable(item) for item in inputs]
    place = sources[root].data_ptr() if sources else 0
    [buffer], finish = overlaps.result(tensor, name, sources, root, place)
    send: Parts = sources or [None] * size
    receive = _only_for(root, buffer, size)
    return exchange(group, name, blocks_of(send), blocks_of(receive), [tensor], opts, finish, (send, receive), root)


def alltoall_base(
    group: Group,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    opts: Any,
) -> Work:
    """Rows of the input to each rank, rows of the output from each; equal parts where no sizes are given."""
    name, size, rank = "all_to_all_single", group.size(), group.rank()
    arguments.check_alike(check(output, name), check(input, name), name)
    ins = arguments.split_sizes(input_split_sizes, input, size, "input", name)
    outs = arguments.split_sizes(output_split_sizes, output, size, "output", name)
    arguments.check_numel_pair(ins[rank], outs[rank], name)
    buffer, finish = writable(output, name)
    [source] = overlaps.inputs([readable(input)], [buffer])
    return exchange(group, name, rows_of(source, ins), rows_of(buffer, outs), [output], opts, finish, (source, buffer))


def alltoall(group: Group, output_tensors: Tensors, input_tensors: Tensors, opts: Any) -> Work:
    """Entry ``r`` of the input list to rank ``r``, entry ``r`` of the output list from it."""
    name, size, rank = "all_to_all", group.size(), group.rank()
    arguments.check_count(len(output_tensors), size, "the output list", name)
    arguments.check_count(len(input_tensors), size, "the input list", name)
    for tensor in [*output_tensors, *input_tensors]:
        arguments.check_alike(check(tensor, name), input_tensors[0], name)
    arguments.check_numel_pair(input_tensors[rank].numel(), output_tensors[rank].numel(), name)
    receive, finish = overlaps.results(output_tensors, name)
    place = receive[rank].data_ptr()
    send = overlaps.inputs([readable(tensor) for tensor in input_tensors], receive, rank, place)
    keep = send, receive
    return exchange(group, name, blocks_of(send), blocks_of(receive), list(output_tensors), opts, finish, keep)
