"""Reductions: all_reduce, reduce and reduce_scatter, in the forms and under the names that c10d knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..diagnosis.comparison import Call
from ..diagnosis.flight_recorder import tensors_in
from ..engine.coalesced import CoalescedWork
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import NoTensorsError, blocks_of, bytes_of, check, readable, rows_of, single, writable
from ..tensors.overlaps import Memory
from . import device_reductions, several, sparse
from .messages import Messages, first_of

Tensors = list[torch.Tensor]
Parts = Sequence[torch.Tensor | None]


class Reducing(Messages):
    """Operations that compute."""

    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduce every rank's tensor elementwise, in place, to bitwise the same result everywhere.

        bfloat16, float16 and float8 are summed in float32 and rounded once. AVG of integers truncates;
        SUM of bool is "or". Several tensors for a rank, all alike, are reduced first, and all receive the result.
        """
        if sparse.are_meant(tensors):
            return sparse.all_reduce(self, tensors, opts)
        if len(tensors) > 1:
            return several.all_reduce(self, tensors, opts)
        tensor = single(tensors, "all_reduce")
        return self._allreduce(tensor, opts, not opts.asyncOp)

    def _allreduce(
        self,
        tensor: torch.Tensor,
        opts: Any,
        sync: bool,
        memory: Memory | None = None,
        receivers: Sequence[torch.Tensor] = (),
    ) -> Work:
        """
        Args:
            memory: where the result goes and what puts it into the tensor, if that is settled.
            receivers: tensors that the result is copied to; where there are some, ``tensor`` is nobody's.
        """
        how = self._reduction(tensor.dtype, opts.reduceOp, "all_reduce")
        if memory is None:
            buffer, finish = writable(tensor, "all_reduce", load=True)
        else:
            [buffer], finish = memory
        finish, results = several.copied(buffer, receivers, "all_reduce", finish), list(receivers) or [tensor]
        address = buffer.data_ptr()
        count = buffer.numel()
        group = self._begin_collective("all_reduce")
        if self._calls.compares:
            self._compare("all_reduce", Call(tensor, [count], opts.reduceOp), opts)
        if self._direct and device_reductions.suits(buffer, bytes_of(buffer), how):
            begun = device_reductions.to_ranks(self, buffer, how, None)
            return self._issue("all_reduce", begun.start, (), sync, results, opts, finish, begun.keep, then=begun.then)
        staging = 0 if tensor.is_cpu else self._stage(tensor)
        operands = group, address, address, count, how, staging, SLICE_NS if sync else 0
        return self._issue("all_reduce", self._lib.mpp_allreduce, operands, sync, results, opts, finish, buffer)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> CoalescedWork:
        """``allreduce`` of each tensor, as one Work."""
        if not tensors:
            raise NoTensorsError("all_reduce_coalesced: the list of tensors is empty")
        for tensor in tensors:
            self._reduction(check(tensor, "all_reduce_coalesced").dtype, opts.reduceOp, "all_reduce_coalesced")
        memories: Sequence[Memory | None] = overlaps.results_of_all(
            [[tensor] for tensor in tensors], "all_reduce_coalesced", load=True
        ) or [None] * len(tensors)
        sync = not opts.asyncOp
        works = [self._allreduce(tensor, opts, sync, memory) for tensor, memory in zip(tensors, memories, strict=True)]
        return CoalescedWork(works, list(tensors))

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce every rank's tensor elementwise into the root's; the others' stay as they are."""
        tensor = single(tensors, "reduce")
        several.one_of(tensors, opts.rootTensor, "reduce")
        root = arguments.check_root(opts.rootRank, self._size, "reduce")
        how = self._reduction(tensor.dtype, opts.reduceOp, "reduce")
        sync, finish = not opts.asyncOp, None
        if root == self._rank:
            buffer, finish = writable(tensor, "reduce", load=True)
        else:
            buffer = readable(tensor)
        address = buffer.data_ptr()
        count = buffer.numel()
        group = self._begin_collective("reduce")
        if self._calls.compares:
            self._compare("reduce", Call(tensor, [count], opts.reduceOp, root), opts)
        if self._direct and device_reductions.suits(buffer, bytes_of(buffer), how):
            begun = device_reductions.to_ranks(self, buffer, how, root)
            return self._issue("reduce", begun.start, (), sync, [tensor], opts, finish, begun.keep, then=begun.then)
        staging = 0 if tensor.is_cpu else self._stage(tensor)
        operands = group, address, address, count, how, root, staging, SLICE_NS if sync else 0
        return self._issue("reduce", self._lib.mpp_reduce_to, operands, sync, [tensor], opts, finish, buffer)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        """Reduce entry ``r`` of every rank's input list into rank ``r``'s tensor; entries may differ in length."""
        output, inputs = single(output_tensors, "reduce_scatter"), first_of(input_tensors, "reduce_scatter")
        arguments.check_count(len(inputs), self._size, "the input list", "reduce_scatter")
        for item in inputs:
            arguments.check_alike(check(item, "reduce_scatter"), output, "reduce_scatter")
        arguments.check_numel(output, inputs[self._rank].numel(), "the output", "reduce_scatter")
        sources = [readable(item) for item in inputs]
        counts = [source.numel() for source in sources]
        name, own = "reduce_scatter", sources[self._rank].data_ptr()
        memory = overlaps.result(output, name, sources, self._rank, own)
        return self._reduce_blocks(name, output, sources, blocks_of(sources)[0], counts, False, opts, memory)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Reduce block ``r`` of every rank's input, of ``size`` equal blocks, into rank ``r``'s output."""
        return self._reduce_scatter_into(output, input, opts)

    def _reduce_scatter_into(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any, memory: Memory | None = None
    ) -> Work:
        name = "reduce_scatter_tensor"
        arguments.check_alike(check(input, name), check(output, name), name)
        arguments.check_numel(input, output.numel() * self._size, "the input", name)
        source, counts = readable(input), [output.numel()] * self._size
        addresses, _ = rows_of(source, counts)
        memory = memory or overlaps.result(output, name, [source], 0, addresses[self._rank])
        return self._reduce_blocks(name, output, source, addresses, counts, True, opts, memory)

    def _reduce_blocks(
        self,
        name: str,
        output: torch.Tensor,
        keep: Any,
        addresses: list[int],
        counts: list[int],
        flat: bool,
        opts: Any,
        memory: Memory,
    ) -> Work:
        how = self._reduction(output.dtype, opts.reduceOp, name)
        sync = not opts.asyncOp
        [buffer], finish = memory
        group = self._begin_collective(name)
        if self._calls.compares:
            self._compare(name, Call(output, counts, opts.reduceOp), opts)
        if self._direct and device_reductions.suits(output, sum(counts) * output.element_size(), how):
            begun = device_reductions.to_one(self, keep, counts, buffer, how)
            return self._issue(name, begun.start, (), sync, [output], opts, finish, begun.keep, then=begun.then)
        staging = 0 if output.is_cpu else self._stage(output)
        operands = group, addresses, buffer.data_ptr(), counts, flat, how, staging, SLICE_NS if sync else 0
        start, inputs, keep = self._lib.mpp_reduce_scatter, tensors_in(keep), (keep, buffer)
        return self._issue(name, start, operands, sync, [output], opts, finish, keep, inputs=inputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> CoalescedWork:
        """``reduce_scatter_single`` of each pair, as one Work."""
        return self._each(
            self._reduce_scatter_base,
            self._reduce_scatter_into,
            outputs,
            inputs,
            opts,
            "reduce_scatter_tensor_coalesced",
        )
