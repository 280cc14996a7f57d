"""Every rank's own part to or from the others: all_gather, gather, scatter and all_to_all, in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ..diagnosis.comparison import Call
from ..engine.engine import SLICE_NS
from ..engine.work import CoalescedWork, Work
from ..tensors import arguments
from ..tensors.arguments import blocks_of, bytes_of, check, readable, rows_of, single, writable
from .messages import Messages, ends_coalescing_on_error, first_of, options_of

Tensors = list[torch.Tensor]
Parts = Sequence[torch.Tensor | None]


class Exchanging(Messages):
    """Operations that move a part for each rank."""

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> Work:
        """Every rank's tensor into the output list; ranks may have different shapes."""
        opts = options_of(c10d.AllgatherOptions, opts, timeout)
        return self._allgather(first_of(output_tensors), single(input_tensors, "all_gather"), opts)

    def _allgather(self, outputs: Tensors, tensor: torch.Tensor, opts: Any) -> Work:
        arguments.check_count(len(outputs), self._size, "the output list", "all_gather")
        for output in outputs:
            arguments.check_alike(check(output, "all_gather"), tensor, "all_gather")
        arguments.check_numel(outputs[self._rank], tensor.numel(), "this rank's output", "all_gather")
        sync = not opts.asyncOp
        source = readable(tensor)
        buffers, finishes = zip(*(writable(output, "all_gather") for output in outputs), strict=True)
        addresses, lengths = blocks_of(buffers)
        sent = [bytes_of(source)] * self._size
        group = self._begin_collective("all_gather")
        if self._calls.compares:
            self._compare("all_gather", Call(tensor, send=sent, receive=lengths), opts)
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        wait_ns = SLICE_NS if sync else 0
        operands, start = (group, source.data_ptr(), addresses, lengths, staging, wait_ns), self._lib.mpp_allgather_list
        finish, keep, outputs = arguments.all_of(finishes), (source, buffers), list(outputs)
        return self._issue("all_gather", start, operands, sync, outputs, opts, finish, keep, inputs=[tensor])

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Every rank's tensor, one after the other, into one output of ``size`` times its elements."""
        opts = options_of(c10d.AllgatherOptions, opts, None)
        name = "all_gather_into_tensor"
        arguments.check_alike(check(output, name), check(input, name), name)
        arguments.check_numel(output, input.numel() * self._size, "the output", name)
        sync = not opts.asyncOp
        source = readable(input)
        buffer, finish = writable(output, name)
        group = self._begin_collective(name)
        if self._calls.compares:
            self._compare(name, Call(input, [input.numel()]), opts)
        staging = 0 if input.is_cpu else self._stage(input, moves=True)
        operands = group, source.data_ptr(), buffer.data_ptr(), bytes_of(source), staging, SLICE_NS if sync else 0
        start, keep = self._lib.mpp_allgather, (source, buffer)
        return self._issue(name, start, operands, sync, [output], opts, finish, keep, inputs=[input])

    all_gather_single = allgather_into_tensor = _allgather_base

    @ends_coalescing_on_error
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CoalescedWork:
        """``all_gather_single`` of each pair, as one Work."""
        return self._each(self._allgather_base, outputs, inputs, opts, "all_gather_into_tensor_coalesced")

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> CoalescedWork:
        """``allgather`` of each input: ``output_lists[rank][i]`` receives that rank's ``inputs[i]``."""
        opts = options_of(c10d.AllgatherOptions, opts, None)
        arguments.check_count(len(output_lists), self._size, "the output lists", "all_gather_coalesced")
        for outputs in output_lists:
            arguments.check_count(len(outputs), len(inputs), "each output list", "all_gather_coalesced")
        columns = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        works = [
            self._allgather(column, check(tensor, "all_gather_coalesced"), opts)
            for column, tensor in zip(columns, inputs, strict=True)
        ]
        return CoalescedWork(works, [tensor for outputs in output_lists for tensor in outputs])

    def _list_of_root(self, given: Any, tensor: torch.Tensor, root: int, name: str, side: str) -> Tensors:
        """The tensors that the root alone gives, one for each rank and each like ``tensor``; elsewhere none."""
        if root != self._rank:
            if given and first_of(given):
                raise ValueError(f"{name}: only the root may pass an {side} list")
            return []
        items = list(first_of(given))
        arguments.check_count(len(items), self._size, f"the root's {side} list", name)
        for item in items:
            arguments.check_alike(check(item, name), tensor, name)
            arguments.check_numel(item, tensor.numel(), f"each {side}", name)
        return items

    def _only_for(self, root: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        """What goes to or comes from the root alone."""
        return [tensor if rank == root else None for rank in range(self._size)]

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        *,
        root: int | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Every rank's tensor into the root's output list."""
        opts = options_of(c10d.GatherOptions, opts, timeout, rootRank=root)
        root = arguments.check_root(opts.rootRank, self._size, "gather")
        tensor = single(input_tensors, "gather")
        outputs = self._list_of_root(output_tensors, tensor, root, "gather", "output")
        pairs = [writable(output, "gather") for output in outputs]
        finish = arguments.all_of([done for _, done in pairs])
        send = self._only_for(root, readable(tensor))
        receive: Parts = [buffer for buffer, _ in pairs] or [None] * self._size
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("gather", *blocks, outputs or [tensor], opts, finish, keep, root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Every rank's tensor, one after the other, into the root's output; the others' output is not looked at."""
        opts, name = options_of(c10d.GatherOptions, opts, None), "gather_single"
        root = arguments.check_root(opts.rootRank, self._size, name)
        source = readable(check(input, name))
        send = blocks_of(self._only_for(root, source))
        if root != self._rank:
            return self._exchange(name, send, blocks_of([None] * self._size), [input], opts, None, (source, None), root)
        arguments.check_alike(check(output, name), input, name)
        arguments.check_numel(output, input.numel() * self._size, "the root's output", name)
        buffer, finish = writable(output, name)
        receive = rows_of(buffer, [input.numel()] * self._size)
        return self._exchange(name, send, receive, [output], opts, finish, (source, buffer), root)

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        *,
        root: int | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Entry ``r`` of the root's input list into rank ``r``'s tensor."""
        opts = options_of(c10d.ScatterOptions, opts, timeout, rootRank=root)
        root = arguments.check_root(opts.rootRank, self._size, "scatter")
        tensor = single(output_tensors, "scatter")
        inputs = self._list_of_root(input_tensors, tensor, root, "scatter", "input")
        buffer, finish = writable(tensor, "scatter")
        send: Parts = [readable(item) for item in inputs] or [None] * self._size
        receive = self._only_for(root, buffer)
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("scatter", *blocks, [tensor], opts, finish, keep, root)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> Work:
        """Rows of the input to each rank, rows of the output from each; equal parts where no sizes are given."""
        name = "all_to_all_single"
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        arguments.check_alike(check(output, name), check(input, name), name)
        ins = arguments.split_sizes(input_split_sizes or (), input, self._size, "input", name)
        outs = arguments.split_sizes(output_split_sizes or (), output, self._size, "output", name)
        arguments.check_numel_pair(ins[self._rank], outs[self._rank], name)
        source = readable(input)
        buffer, finish = writable(output, name)
        send, receive = rows_of(source, ins), rows_of(buffer, outs)
        return self._exchange(name, send, receive, [output], opts, finish, (source, buffer))

    all_to_all_single = alltoall_base

    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None, *, timeout: timedelta | None = None
    ) -> Work:
        """Entry ``r`` of the input list to rank ``r``, entry ``r`` of the output list from it."""
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        arguments.check_count(len(output_tensors), self._size, "the output list", "all_to_all")
        arguments.check_count(len(input_tensors), self._size, "the input list", "all_to_all")
        for tensor in [*output_tensors, *input_tensors]:
            arguments.check_alike(check(tensor, "all_to_all"), input_tensors[0], "all_to_all")
        mine = (input_tensors[self._rank].numel(), output_tensors[self._rank].numel())
        arguments.check_numel_pair(*mine, "all_to_all")
        pairs = [writable(tensor, "all_to_all") for tensor in output_tensors]
        finish = arguments.all_of([done for _, done in pairs])
        send, receive = [readable(tensor) for tensor in input_tensors], [buffer for buffer, _ in pairs]
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("all_to_all", *blocks, list(output_tensors), opts, finish, keep)
