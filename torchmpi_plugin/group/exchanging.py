"""Every rank's own part to or from the others: all_gather, gather, scatter and all_to_all, in all their forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..diagnosis.comparison import Call
from ..engine.coalesced import CoalescedWork
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import ArgumentError, blocks_of, bytes_of, check, readable, rows_of, single, writable
from ..tensors.overlaps import Memory
from . import several
from .messages import Messages, first_of

Tensors = list[torch.Tensor]
Parts = Sequence[torch.Tensor | None]


class Exchanging(Messages):
    """Operations that move a part for each rank."""

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        """Every rank's tensor into the output list; ranks may have different shapes.

        Of several tensors for a rank, all alike, each output list receives those of all ranks.
        """
        if len(input_tensors) > 1:
            return several.all_gather(self, output_tensors, input_tensors, opts)
        return self._allgather(first_of(output_tensors, "all_gather"), single(input_tensors, "all_gather"), opts)

    def _allgather(
        self,
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
        arguments.check_count(len(outputs), self._size, "the output list", "all_gather")
        for output in outputs:
            arguments.check_alike(check(output, "all_gather"), tensor, "all_gather")
        arguments.check_numel(outputs[self._rank], tensor.numel(), "this rank's output", "all_gather")
        sync = not opts.asyncOp
        buffers, finish = memory or overlaps.results(outputs, "all_gather")
        addresses, lengths = blocks_of(buffers)
        [source] = overlaps.inputs([readable(tensor)], buffers, 0, addresses[self._rank])
        sent = [bytes_of(source)] * self._size
        group = self._begin_collective("all_gather")
        if self._calls.compares:
            self._compare("all_gather", Call(tensor, send=sent, receive=lengths), opts)
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        wait_ns = SLICE_NS if sync else 0
        operands, start = (group, source.data_ptr(), addresses, lengths, staging, wait_ns), self._lib.mpp_allgather_list
        finish, keep = arguments.all_of([finish, then]), (source, buffers)
        outputs = list(outputs) if results is None else results
        return self._issue("all_gather", start, operands, sync, outputs, opts, finish, keep, inputs=[tensor])

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Every rank's tensor, one after the other, into one output of ``size`` times its elements."""
        return self._allgather_into(output, input, opts)

    def _allgather_into(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any, memory: Memory | None = None
    ) -> Work:
        name = "all_gather_into_tensor"
        arguments.check_alike(check(output, name), check(input, name), name)
        arguments.check_numel(output, input.numel() * self._size, "the output", name)
        sync = not opts.asyncOp
        [buffer], finish = memory or overlaps.results([output], name)
        place = buffer.data_ptr() + self._rank * bytes_of(input)
        [source] = overlaps.inputs([readable(input)], [buffer], 0, place)
        group = self._begin_collective(name)
        if self._calls.compares:
            self._compare(name, Call(input, [input.numel()]), opts)
        staging = 0 if input.is_cpu else self._stage(input, moves=True)
        operands = group, source.data_ptr(), buffer.data_ptr(), bytes_of(source), staging, SLICE_NS if sync else 0
        start, keep = self._lib.mpp_allgather, (source, buffer)
        return self._issue(name, start, operands, sync, [output], opts, finish, keep, inputs=[input])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> CoalescedWork:
        """``all_gather_single`` of each pair, as one Work."""
        return self._each(
            self._allgather_base, self._allgather_into, outputs, inputs, opts, "all_gather_into_tensor_coalesced"
        )

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> CoalescedWork:
        """``allgather`` of each input: ``output_lists[rank][i]`` receives that rank's ``inputs[i]``."""
        arguments.check_count(len(output_lists), self._size, "the output lists", "all_gather_coalesced")
        for outputs in output_lists:
            arguments.check_count(len(outputs), len(inputs), "each output list", "all_gather_coalesced")
        columns = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        for tensor in itertools.chain(inputs, *columns):
            check(tensor, "all_gather_coalesced")
        memories: Sequence[Memory | None] = overlaps.results_of_all(columns, "all_gather_coalesced")
        if not memories:
            inputs, memories = overlaps.inputs_of_all(inputs, columns), [None] * len(inputs)
        works = [
            self._allgather(column, tensor, opts, memory)
            for column, tensor, memory in zip(columns, inputs, memories, strict=True)
        ]
        return CoalescedWork(works, [tensor for outputs in output_lists for tensor in outputs])

    def _list_of_root(self, given: Any, tensor: torch.Tensor, root: int, name: str, side: str) -> Tensors:
        """The tensors that the root alone gives, one for each rank and each like ``tensor``; elsewhere none."""
        if root != self._rank:
            if given and first_of(given, name):
                raise ArgumentError(f"{name}: only the root may pass an {side} list")
            return []
        items = list(first_of(given, name))
        arguments.check_count(len(items), self._size, f"the root's {side} list", name)
        for item in items:
            arguments.check_alike(check(item, name), tensor, name)
            arguments.check_numel(item, tensor.numel(), f"each {side}", name)
        return items

    def _only_for(self, root: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        """What goes to or comes from the root alone."""
        return [tensor if rank == root else None for rank in range(self._size)]

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        """Every rank's tensor into the root's output list."""
        root = arguments.check_root(opts.rootRank, self._size, "gather")
        tensor = single(input_tensors, "gather")
        outputs = self._list_of_root(output_tensors, tensor, root, "gather", "output")
        buffers, finish = overlaps.results(outputs, "gather")
        place = buffers[root].data_ptr() if buffers else 0
        send = self._only_for(root, *overlaps.inputs([readable(tensor)], buffers, 0, place))
        receive: Parts = buffers or [None] * self._size
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("gather", *blocks, outputs or [tensor], opts, finish, keep, root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Every rank's tensor, one after the other, into the root's output; the others' output is not looked at."""
        name = "gather_single"
        root = arguments.check_root(opts.rootRank, self._size, name)
        source = readable(check(input, name))
        if root != self._rank:
            send = blocks_of(self._only_for(root, source))
            return self._exchange(name, send, blocks_of([None] * self._size), [input], opts, None, (source, None), root)
        arguments.check_alike(check(output, name), input, name)
        arguments.check_numel(output, input.numel() * self._size, "the root's output", name)
        buffer, finish = writable(output, name)
        receive = rows_of(buffer, [input.numel()] * self._size)
        [source] = overlaps.inputs([source], [buffer], 0, receive[0][root])
        send = blocks_of(self._only_for(root, source))
        return self._exchange(name, send, receive, [output], opts, finish, (source, buffer), root)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        """Entry ``r`` of the root's input list into rank ``r``'s tensor."""
        root = arguments.check_root(opts.rootRank, self._size, "scatter")
        tensor = single(output_tensors, "scatter")
        inputs = self._list_of_root(input_tensors, tensor, root, "scatter", "input")
        sources = [readable(item) for item in inputs]
        place = sources[root].data_ptr() if sources else 0
        [buffer], finish = overlaps.result(tensor, "scatter", sources, root, place)
        send: Parts = sources or [None] * self._size
        receive = self._only_for(root, buffer)
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("scatter", *blocks, [tensor], opts, finish, keep, root)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        """Rows of the input to each rank, rows of the output from each; equal parts where no sizes are given."""
        name = "all_to_all_single"
        arguments.check_alike(check(output, name), check(input, name), name)
        ins = arguments.split_sizes(input_split_sizes, input, self._size, "input", name)
        outs = arguments.split_sizes(output_split_sizes, output, self._size, "output", name)
        arguments.check_numel_pair(ins[self._rank], outs[self._rank], name)
        buffer, finish = writable(output, name)
        [source] = overlaps.inputs([readable(input)], [buffer])
        send, receive = rows_of(source, ins), rows_of(buffer, outs)
        return self._exchange(name, send, receive, [output], opts, finish, (source, buffer))

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any) -> Work:
        """Entry ``r`` of the input list to rank ``r``, entry ``r`` of the output list from it."""
        arguments.check_count(len(output_tensors), self._size, "the output list", "all_to_all")
        arguments.check_count(len(input_tensors), self._size, "the input list", "all_to_all")
        for tensor in [*output_tensors, *input_tensors]:
            arguments.check_alike(check(tensor, "all_to_all"), input_tensors[0], "all_to_all")
        mine = (input_tensors[self._rank].numel(), output_tensors[self._rank].numel())
        arguments.check_numel_pair(*mine, "all_to_all")
        receive, finish = overlaps.results(output_tensors, "all_to_all")
        place = receive[self._rank].data_ptr()
        send = overlaps.inputs([readable(tensor) for tensor in input_tensors], receive, self._rank, place)
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("all_to_all", *blocks, list(output_tensors), opts, finish, keep)
