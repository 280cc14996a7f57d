"""Collectives that reduce, in their single, list, coalesced and sparse forms."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import Case, Shape, concatenated, stacked
from expected import reduced, reduced_case
from moving_operations import works_of
from started import Started
from torch.distributed.distributed_c10d import _coalescing_manager

import torchmpi_plugin

# 2.13 renamed this function and deprecated its old name.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(case: Case) -> Started:
    tensor = case.place(case.number(case.rank))
    work = dist.all_reduce(tensor, case.op, group=case.process_group, async_op=case.is_async)
    return Started(works_of(work), [tensor], [reduced_case(case)])


def reduce(case: Case) -> Started:
    tensor = case.place(case.number(case.rank))
    work = dist.reduce(tensor, dst=case.global_root, op=case.op, group=case.process_group, async_op=case.is_async)
    if case.rank != case.root:  # what is left in its buffer is not defined
        return Started(other_works=works_of(work))
    return Started(works_of(work), [tensor], [reduced_case(case)])


def scan(case: Case) -> Started:
    return prefix(case, torchmpi_plugin.scan, case.rank + 1)


def exscan(case: Case) -> Started:
    return prefix(case, torchmpi_plugin.exscan, case.rank)


def prefix(case: Case, function, ranks: int) -> Started:
    """Of so many ranks; of none: the tensor stays as it is."""
    numbers = [case.number(rank) for rank in range(case.size)]
    tensor = case.place(numbers[case.rank])
    work = function(tensor, case.op, case.process_group, case.is_async)
    expected = reduced(numbers[:ranks], case.op_name) if ranks else numbers[0]
    return Started(works_of(work), [tensor], [expected])


def reduce_scatter(case: Case) -> Started:
    parts = [case.number(case.rank, slot) for slot in range(case.size)]
    inputs = [case.place(part) for part in parts]
    output = case.empty()
    work = dist.reduce_scatter(output, inputs, case.op, group=case.process_group, async_op=case.is_async)
    expected = [reduced_case(case, case.rank)]
    return Started(works_of(work), [output], expected, list(zip(inputs, parts, strict=True)))


def reduce_scatter_tensor(case: Case) -> Started:
    """The concatenated form; a 0-d tensor counts as one row."""
    return scatter_tensor(case, concatenated(case))


def reduce_scatter_tensor_stacked(case: Case) -> Started:
    return scatter_tensor(case, stacked(case))


def everyones_parts(case: Case, shape: Shape, first_slot: int = 0) -> torch.Tensor:
    slots = range(first_slot, first_slot + case.size)
    return torch.stack([case.number(case.rank, slot) for slot in slots]).reshape(shape)


def scatter_tensor(case: Case, shape: Shape) -> Started:
    given = everyones_parts(case, shape)
    tensor, output = case.place(given), case.empty()
    work = reduce_scatter_single(output, tensor, case.op, group=case.process_group, async_op=case.is_async)
    return Started(works_of(work), [output], [reduced_case(case, case.rank)], [(tensor, given)])


def coalesced_all_reduce(case: Case) -> Started:
    """Three all_reduces of different shapes in one coalescing block."""
    shapes = [case.shape, (3, *case.shape), (1,)]
    tensors = [case.place(case.number(case.rank, slot, shape)) for slot, shape in enumerate(shapes)]
    with _coalescing_manager(case.process_group, async_ops=case.is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, case.op, group=case.process_group)
    expected = [reduced_case(case, slot, shape) for slot, shape in enumerate(shapes)]
    return Started(manager.works, tensors, expected)


def all_reduce_coalesced(case: Case) -> Started:
    """The deprecated function, which gives a future instead of a work."""
    shapes = [case.shape, (3, *case.shape), (1,)]
    tensors = [case.place(case.number(case.rank, slot, shape)) for slot, shape in enumerate(shapes)]
    future = dist.all_reduce_coalesced(tensors, case.op, group=case.process_group, async_op=case.is_async)
    expected = [reduced_case(case, slot, shape) for slot, shape in enumerate(shapes)]
    return Started(works_of(future), tensors, expected)


def coalesced_reduce_scatter_tensor(case: Case) -> Started:
    given = [everyones_parts(case, concatenated(case), 10 * block) for block in range(3)]
    inputs = [case.place(tensor) for tensor in given]
    outputs = [case.empty() for _ in inputs]
    with _coalescing_manager(case.process_group, async_ops=case.is_async) as manager:
        for output, tensor in zip(outputs, inputs, strict=True):
            reduce_scatter_single(output, tensor, case.op, group=case.process_group)
    expected = [reduced_case(case, 10 * block + case.rank) for block in range(3)]
    return Started(manager.works, outputs, expected, list(zip(inputs, given, strict=True)))


def sparse_tensor(case: Case, rank: int) -> torch.Tensor:
    """A COO tensor of rows, as embeddings have for gradients.

    Ranks hold different numbers of rows, rank 1 none, and a row may come twice. The numbers are
    small and whole, so that no order of additions rounds.
    """
    height = case.shape[0]
    count = 0 if rank == 1 else min(height, 2 + rank)
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(0, height, (1, count), generator=generator)
    values = torch.randint(-4, 5, (count, *case.shape[1:]), generator=generator)
    return torch.sparse_coo_tensor(rows, values.to(case.dtype), case.shape)


def sparse_all_reduce(case: Case) -> Started:
    tensor = sparse_tensor(case, case.rank)
    work = dist.all_reduce(tensor, case.op, group=case.process_group, async_op=case.is_async)
    inputs = [sparse_tensor(case, rank).to_dense() for rank in range(case.size)]
    return Started(works_of(work), [tensor.to_dense], [reduced(inputs, "SUM")])
