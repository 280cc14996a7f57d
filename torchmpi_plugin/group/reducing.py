"""Reductions: all_reduce, reduce and reduce_scatter, in the forms and under the names that c10d knows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ..diagnosis.comparison import Call
from ..diagnosis.flight_recorder import tensors_in
from ..engine.engine import SLICE_NS
from ..engine.work import CoalescedWork, Work
from ..tensors import arguments
from ..tensors.arguments import blocks_of, bytes_of, check, readable, rows_of, single, writable
from . import device_reductions, sparse
from .messages import Messages, ends_coalescing_on_error, first_of, options_of

Tensors = list[torch.Tensor]
Parts = Sequence[torch.Tensor | None]


class Reducing(Messages):
    """Operations that compute."""

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduce every rank's tensor elementwise, in place, to bitwise the same result everywhere.

        bfloat16, float16 and float8 are summed in float32 and rounded once. AVG of integers truncates;
        SUM of bool is "or".
        """
        if type(opts) is not c10d.AllreduceOptions:
            op = opts if opts is not None and not hasattr(opts, "reduceOp") else op
            opts = options_of(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = single(tensors, "all_reduce", sparse=True)
        if tensor.layout is not torch.strided:
            return sparse.all_reduce(self, tensor, opts)
        return self._allreduce(tensor, opts, not opts.asyncOp)

    def _allreduce(self, tensor: torch.Tensor, opts: Any, sync: bool) -> Work:
        how = self._reduction(tensor.dtype, opts.reduceOp, "all_reduce")
        buffer, finish = writable(tensor, "all_reduce", load=True)
        address = buffer.data_ptr()
        count = buffer.numel()
        group = self._begin_collective("all_reduce")
        if self._calls.compares:
            self._compare("all_reduce", Call(tensor, [count], opts.reduceOp), opts)
        if self._direct and device_reductions.suits(buffer, bytes_of(buffer), how):
            begun = device_reductions.to_ranks(self, buffer, how, None)
            return self._issue("all_reduce", begun.start, (), sync, [tensor], opts, finish, begun.keep, then=begun.then)
        staging = 0 if tensor.is_cpu else self._stage(tensor)
        operands = group, address, address, count, how, staging, SLICE_NS if sync else 0
        return self._issue("all_reduce", self._lib.mpp_allreduce, operands, sync, [tensor], opts, finish, buffer)

    @ends_coalescing_on_error
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> CoalescedWork:
        """``allreduce`` of each tensor, as one Work."""
        opts = options_of(c10d.AllreduceCoalescedOptions, opts, None)
        for tensor in tensors:
            self._reduction(check(tensor, "all_reduce_coalesced").dtype, opts.reduceOp, "all_reduce_coalesced")
        return CoalescedWork([self._allreduce(tensor, opts, not opts.asyncOp) for tensor in tensors], list(tensors))

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        *,
        root: int | None = None,
        op: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Reduce every rank's tensor elementwise into the root's; the others' stay as they are."""
        opts = options_of(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        tensor = single(tensors, "reduce")
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

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        *,
        op: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Reduce entry ``r`` of every rank's input list into rank ``r``'s tensor; entries may differ in length."""
        if type(opts) is not c10d.ReduceScatterOptions:
            op = opts if opts is not None and not hasattr(opts, "reduceOp") else op
            opts = options_of(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        output, inputs = single(output_tensors, "reduce_scatter"), first_of(input_tensors)
        arguments.check_count(len(inputs), self._size, "the input list", "reduce_scatter")
        for item in inputs:
            arguments.check_alike(check(item, "reduce_scatter"), output, "reduce_scatter")
        arguments.check_numel(output, inputs[self._rank].numel(), "the output", "reduce_scatter")
        sources = [readable(item) for item in inputs]
        counts = [source.numel() for source in sources]
        return self._reduce_blocks("reduce_scatter", output, sources, blocks_of(sources)[0], counts, False, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce block ``r`` of every rank's input, of ``size`` equal blocks, into rank ``r``'s output."""
        opts = options_of(c10d.ReduceScatterOptions, opts, None)
        name = "reduce_scatter_tensor"
        arguments.check_alike(check(input, name), check(output, name), name)
        arguments.check_numel(input, output.numel() * self._size, "the input", name)
        source, counts = readable(input), [output.numel()] * self._size
        return self._reduce_blocks(name, output, source, rows_of(source, counts)[0], counts, True, opts)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def _reduce_blocks(
        self, name: str, output: torch.Tensor, keep: Any, addresses: list[int], counts: list[int], flat: bool, opts: Any
    ) -> Work:
        how = self._reduction(output.dtype, opts.reduceOp, name)
        sync = not opts.asyncOp
        buffer, finish = writable(output, name)
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

    @ends_coalescing_on_error
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CoalescedWork:
        """``reduce_scatter_single`` of each pair, as one Work."""
        return self._each(self._reduce_scatter_base, outputs, inputs, opts, "reduce_scatter_tensor_coalesced")

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
