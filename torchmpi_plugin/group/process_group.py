"""The collectives of c10d, one method each: check the arguments, pick buffers, hand over to C.

Every method returns a Work. With ``asyncOp`` false the operation is complete when the method returns.
Older torch calls some operations by other names; both are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from . import arguments, device_reductions, sparse
from .agreement import Call
from .arguments import blocks_of, bytes_of, check, readable, rows_of, single, writable
from .engine import SLICE_NS
from .flight_recorder import tensors_in
from .messages import Messages, ends_coalescing_on_error
from .splitting import Splitting
from .windows import Windows
from .work import CoalescedWork, Work

Tensors = list[torch.Tensor]
Parts = Sequence[torch.Tensor | None]


def _options(kind: Any, given: Any, timeout: timedelta | None, **fields: Any) -> Any:
    """c10d's options of an operation, from whichever of its overloads was called."""
    if isinstance(given, kind):
        return given
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    for name, value in fields.items():
        if value is not None:
            setattr(options, name, value)
    return options


def _first(lists: Any) -> Any:
    """The one inner list of an argument that c10d passes as a list of lists."""
    return lists[0] if lists and isinstance(lists[0], (list, tuple)) else lists


class ProcessGroupMPI(Messages, Splitting, Windows):
    """A ``torch.distributed`` process group on MPI.

    The arguments are c10d's; ranks are ranks of the group. Unless said otherwise a method raises ValueError
    or TypeError for arguments that cannot work, before anything is sent, and its Work raises
    DistBackendError when the operation fails or its time is up.
    """

    # ---- to and from all ----

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has come."""
        opts = _options(c10d.BarrierOptions, opts, timeout)
        sync = not getattr(opts, "asyncOp", True)
        group = self._begin_collective("barrier")
        if self._compares:
            self._compare("barrier", Call(), opts)
        return self._issue("barrier", self._lib.mpp_barrier, (group, SLICE_NS if sync else 0), sync, [], opts)

    def broadcast(
        self, tensors: Any, opts: Any = None, *, root: int | None = None, timeout: timedelta | None = None
    ) -> Work:
        """Copy the root's tensor to every rank's."""
        root = opts if isinstance(opts, int) else root
        opts = _options(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        tensor = single(tensors, "broadcast")
        root = arguments.check_root(opts.rootRank, self._size, "broadcast")
        sync = not opts.asyncOp
        buffer, finish = writable(tensor, "broadcast", load=root == self._rank)
        group = self._begin_collective("broadcast")
        if self._compares:
            self._compare("broadcast", Call(tensor, [tensor.numel()], root=root), opts)
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        wait_ns = SLICE_NS if sync else 0
        operands = group, buffer.data_ptr(), bytes_of(buffer), root, staging, wait_ns
        return self._issue("broadcast", self._lib.mpp_broadcast, operands, sync, [tensor], opts, finish, buffer)

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduce every rank's tensor elementwise, in place, to bitwise the same result everywhere.

        bfloat16, float16 and float8 are summed in float32 and rounded once. AVG of integers truncates;
        SUM of bool is "or".
        """
        if type(opts) is not c10d.AllreduceOptions:
            op = opts if opts is not None and not hasattr(opts, "reduceOp") else op
            opts = _options(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
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
        if self._compares:
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
        opts = _options(c10d.AllreduceCoalescedOptions, opts, None)
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
        root = opts if isinstance(opts, int) else root
        opts = _options(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
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
        if self._compares:
            self._compare("reduce", Call(tensor, [count], opts.reduceOp, root), opts)
        if self._direct and device_reductions.suits(buffer, bytes_of(buffer), how):
            begun = device_reductions.to_ranks(self, buffer, how, root)
            return self._issue("reduce", begun.start, (), sync, [tensor], opts, finish, begun.keep, then=begun.then)
        staging = 0 if tensor.is_cpu else self._stage(tensor)
        operands = group, address, address, count, how, root, staging, SLICE_NS if sync else 0
        return self._issue("reduce", self._lib.mpp_reduce_to, operands, sync, [tensor], opts, finish, buffer)

    # ---- gathering ----

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> Work:
        """Every rank's tensor into the output list; ranks may have different shapes."""
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        return self._allgather(_first(output_tensors), single(input_tensors, "all_gather"), opts)

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
        if self._compares:
            self._compare("all_gather", Call(tensor, send=sent, receive=lengths), opts)
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        wait_ns = SLICE_NS if sync else 0
        operands, start = (group, source.data_ptr(), addresses, lengths, staging, wait_ns), self._lib.mpp_allgather_list
        finish, keep, outputs = arguments.all_of(finishes), (source, buffers), list(outputs)
        return self._issue("all_gather", start, operands, sync, outputs, opts, finish, keep, inputs=[tensor])

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Every rank's tensor, one after the other, into one output of ``size`` times its elements."""
        opts = _options(c10d.AllgatherOptions, opts, None)
        name = "all_gather_into_tensor"
        arguments.check_alike(check(output, name), check(input, name), name)
        arguments.check_numel(output, input.numel() * self._size, "the output", name)
        sync = not opts.asyncOp
        source = readable(input)
        buffer, finish = writable(output, name)
        group = self._begin_collective(name)
        if self._compares:
            self._compare(name, Call(input, [input.numel()]), opts)
        staging = 0 if input.is_cpu else self._stage(input, moves=True)
        operands = group, source.data_ptr(), buffer.data_ptr(), bytes_of(source), staging, SLICE_NS if sync else 0
        start, keep = self._lib.mpp_allgather, (source, buffer)
        return self._issue(name, start, operands, sync, [output], opts, finish, keep, inputs=[input])

    all_gather_single = allgather_into_tensor = _allgather_base

    @ends_coalescing_on_error
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CoalescedWork:
        """``all_gather_single`` of each pair, as one Work."""
        arguments.check_count(len(outputs), len(inputs), "the output list", "all_gather_into_tensor_coalesced")
        works = [self._allgather_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return CoalescedWork(works, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> CoalescedWork:
        """``allgather`` of each input: ``output_lists[rank][i]`` receives that rank's ``inputs[i]``."""
        opts = _options(c10d.AllgatherOptions, opts, None)
        arguments.check_count(len(output_lists), self._size, "the output lists", "all_gather_coalesced")
        for outputs in output_lists:
            arguments.check_count(len(outputs), len(inputs), "each output list", "all_gather_coalesced")
        columns = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        works = [
            self._allgather(column, check(tensor, "all_gather_coalesced"), opts)
            for column, tensor in zip(columns, inputs, strict=True)
        ]
        return CoalescedWork(works, [tensor for outputs in output_lists for tensor in outputs])

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
        root = opts if isinstance(opts, int) else root
        opts = _options(c10d.GatherOptions, opts, timeout, rootRank=root)
        root = arguments.check_root(opts.rootRank, self._size, "gather")
        tensor = single(input_tensors, "gather")
        outputs: Tensors = list(_first(output_tensors)) if root == self._rank else []
        if root == self._rank:
            arguments.check_count(len(outputs), self._size, "the root's output list", "gather")
        elif output_tensors and _first(output_tensors):
            raise ValueError("gather: only the root may pass an output list")
        for output in outputs:
            arguments.check_alike(check(output, "gather"), tensor, "gather")
            arguments.check_numel(output, tensor.numel(), "each output", "gather")
        source = readable(tensor)
        send = [source if r == root else None for r in range(self._size)]
        pairs = [writable(output, "gather") for output in outputs]
        receive: Parts = [buffer for buffer, _ in pairs] or [None] * self._size
        finish = arguments.all_of([done for _, done in pairs])
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("gather", *blocks, outputs or [tensor], opts, finish, keep, root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Every rank's tensor, one after the other, into the root's output; the others' output is not looked at."""
        opts, name, everybody = _options(c10d.GatherOptions, opts, None), "gather_single", range(self._size)
        root = arguments.check_root(opts.rootRank, self._size, name)
        source = readable(check(input, name))
        send = blocks_of([source if r == root else None for r in everybody])
        if root != self._rank:
            return self._exchange(name, send, blocks_of([None] * self._size), [input], opts, None, (source, None), root)
        arguments.check_alike(check(output, name), input, name)
        arguments.check_numel(output, input.numel() * self._size, "the root's output", name)
        buffer, finish = writable(output, name)
        receive = rows_of(buffer, [input.numel() for _ in everybody])
        return self._exchange(name, send, receive, [output], opts, finish, (source, buffer), root)

    gather_into_tensor = gather_single

    # ---- scattering ----

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
        root = opts if isinstance(opts, int) else root
        opts = _options(c10d.ScatterOptions, opts, timeout, rootRank=root)
        root = arguments.check_root(opts.rootRank, self._size, "scatter")
        tensor = single(output_tensors, "scatter")
        inputs: Tensors = list(_first(input_tensors)) if root == self._rank else []
        if root == self._rank:
            arguments.check_count(len(inputs), self._size, "the root's input list", "scatter")
        elif input_tensors and _first(input_tensors):
            raise ValueError("scatter: only the root may pass an input list")
        for item in inputs:
            arguments.check_alike(check(item, "scatter"), tensor, "scatter")
            arguments.check_numel(item, tensor.numel(), "each input", "scatter")
        send: Parts = [readable(item) for item in inputs] or [None] * self._size
        buffer, finish = writable(tensor, "scatter")
        receive = [buffer if r == root else None for r in range(self._size)]
        blocks, keep = (blocks_of(send), blocks_of(receive)), (send, receive)
        return self._exchange("scatter", *blocks, [tensor], opts, finish, keep, root)

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
            opts = _options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        output, inputs = single(output_tensors, "reduce_scatter"), _first(input_tensors)
        arguments.check_count(len(inputs), self._size, "the input list", "reduce_scatter")
        for item in inputs:
            arguments.check_alike(check(item, "reduce_scatter"), output, "reduce_scatter")
        arguments.check_numel(output, inputs[self._rank].numel(), "the output", "reduce_scatter")
        sources = [readable(item) for item in inputs]
        addresses, counts = [s.data_ptr() for s in sources], [s.numel() for s in sources]
        return self._reduce_blocks("reduce_scatter", output, sources, addresses, counts, False, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce block ``r`` of every rank's input, of ``size`` equal blocks, into rank ``r``'s output."""
        opts = _options(c10d.ReduceScatterOptions, opts, None)
        name = "reduce_scatter_tensor"
        arguments.check_alike(check(input, name), check(output, name), name)
        arguments.check_numel(input, output.numel() * self._size, "the input", name)
        source, count = readable(input), output.numel()
        step = count * source.element_size()
        addresses = [source.data_ptr() + r * step for r in range(self._size)]
        return self._reduce_blocks(name, output, source, addresses, [count] * self._size, True, opts)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def _reduce_blocks(
        self, name: str, output: torch.Tensor, keep: Any, addresses: list[int], counts: list[int], flat: bool, opts: Any
    ) -> Work:
        how = self._reduction(output.dtype, opts.reduceOp, name)
        sync = not opts.asyncOp
        buffer, finish = writable(output, name)
        group = self._begin_collective(name)
        if self._compares:
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
        arguments.check_count(len(outputs), len(inputs), "the output list", "reduce_scatter_tensor_coalesced")
        works = [self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return CoalescedWork(works, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- all to all ----

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
        opts = _options(c10d.AllToAllOptions, opts, timeout)
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
        opts = _options(c10d.AllToAllOptions, opts, timeout)
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
