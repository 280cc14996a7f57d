"""Collectives that move data and change none of it: broadcast, gathers, scatter, all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import Case, Shape, concatenated, stacked
from started import Started
from torch.distributed.distributed_c10d import _coalescing_manager

# 2.13 renamed this function and deprecated its old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def works_of(work) -> list:
    return [] if work is None else [work]


def everyones(case: Case, slot: int = 0) -> list[torch.Tensor]:
    return [case.data(rank, slot) for rank in range(case.size)]


def broadcast(case: Case) -> Started:
    mine = case.rank == case.root
    tensor = case.place(case.data(case.rank)) if mine else case.empty()
    work = dist.broadcast(tensor, src=case.global_root, group=case.process_group, async_op=case.is_async)
    return Started(works_of(work), [tensor], [case.data(case.root)])


def all_gather(case: Case) -> Started:
    return gather_lists(case, [case.shape] * case.size)


def all_gather_uneven(case: Case) -> Started:
    """Rank r gives r more rows than rank 0; of a 0-d shape, r elements, so rank 0 gives none."""

    def shape(rank: int) -> Shape:
        return (case.shape[0] + rank, *case.shape[1:]) if case.shape else (rank,)

    return gather_lists(case, [shape(rank) for rank in range(case.size)])


def gather_lists(case: Case, shapes: list[Shape]) -> Started:
    expected = [case.data(rank, shape=shape) for rank, shape in enumerate(shapes)]
    outputs = [case.empty(shape) for shape in shapes]
    tensor = case.place(expected[case.rank])
    work = dist.all_gather(outputs, tensor, group=case.process_group, async_op=case.is_async)
    return Started(works_of(work), outputs, expected, [(tensor, expected[case.rank])])


def all_gather_into_tensor(case: Case) -> Started:
    """The concatenated form; a 0-d tensor counts as one row."""
    return gather_into(case, concatenated(case))


def all_gather_into_tensor_stacked(case: Case) -> Started:
    return gather_into(case, stacked(case))


def gather_into(case: Case, shape: Shape) -> Started:
    output, tensor = case.empty(shape), case.place(case.data(case.rank))
    work = all_gather_single(output, tensor, group=case.process_group, async_op=case.is_async)
    expected = torch.stack(everyones(case)).reshape(shape)
    return Started(works_of(work), [output], [expected], [(tensor, case.data(case.rank))])


def gather(case: Case) -> Started:
    mine = case.rank == case.root
    outputs = [case.empty() for _ in range(case.size)] if mine else []
    tensor = case.place(case.data(case.rank))
    work = dist.gather(tensor, outputs or None, dst=case.global_root, group=case.process_group, async_op=case.is_async)
    expected = everyones(case) if mine else []
    return Started(works_of(work), outputs, expected, [(tensor, case.data(case.rank))])


def scatter(case: Case) -> Started:
    mine = case.rank == case.root
    parts = [case.data(case.root, slot) for slot in range(case.size)]
    inputs = [case.place(part) for part in parts] if mine else []
    output = case.empty()
    work = dist.scatter(output, inputs or None, src=case.global_root, group=case.process_group, async_op=case.is_async)
    untouched = list(zip(inputs, parts, strict=False))
    return Started(works_of(work), [output], [parts[case.rank]], untouched)


def all_to_all(case: Case) -> Started:
    return exchange_lists(case, lambda source, target: case.shape)


def all_to_all_uneven(case: Case) -> Started:
    return exchange_lists(case, lambda source, target: rows_shape(case, source, target))


def rows(source: int, target: int) -> int:
    """How many rows `source` sends to `target`: uneven, and sometimes none."""
    return (source + 2 * target) % 3


def rows_shape(case: Case, source: int, target: int) -> Shape:
    height = case.shape[0] if case.shape else 1
    return (rows(source, target) * height, *case.shape[1:])


def exchange_lists(case: Case, shape) -> Started:
    me, everyone = case.rank, range(case.size)
    parts = [case.data(me, target, shape(me, target)) for target in everyone]
    expected = [case.data(source, me, shape(source, me)) for source in everyone]
    inputs = [case.place(part) for part in parts]
    outputs = [case.empty(wanted.shape) for wanted in expected]
    work = dist.all_to_all(outputs, inputs, group=case.process_group, async_op=case.is_async)
    return Started(works_of(work), outputs, expected, list(zip(inputs, parts, strict=True)))


def all_to_all_single(case: Case) -> Started:
    def shape(source: int, target: int) -> Shape:
        return case.shape or (1,)

    return exchange_single(case, shape, with_splits=False)


def all_to_all_single_splits(case: Case) -> Started:
    return exchange_single(case, lambda source, target: rows_shape(case, source, target), with_splits=True)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One after another, by their bytes: torch cannot copy elements of every dtype."""
    together = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return together.view(sum(len(part) for part in parts), *parts[0].shape[1:])


def exchange_single(case: Case, shape, with_splits: bool) -> Started:
    me, everyone = case.rank, range(case.size)
    given = joined([case.data(me, target, shape(me, target)) for target in everyone])
    expected = joined([case.data(source, me, shape(source, me)) for source in everyone])
    output, tensor = case.empty(expected.shape), case.place(given)
    splits = (
        [shape(source, me)[0] for source in everyone] if with_splits else None,
        [shape(me, target)[0] for target in everyone] if with_splits else None,
    )
    work = dist.all_to_all_single(output, tensor, *splits, group=case.process_group, async_op=case.is_async)
    return Started(works_of(work), [output], [expected], [(tensor, given)])


def coalesced_all_gather_into_tensor(case: Case) -> Started:
    """Three gathers in one coalescing block."""
    inputs = [case.place(case.data(case.rank, slot)) for slot in range(3)]
    outputs = [case.empty(concatenated(case)) for _ in inputs]
    with _coalescing_manager(case.process_group, async_ops=case.is_async) as manager:
        for output, tensor in zip(outputs, inputs, strict=True):
            all_gather_single(output, tensor, group=case.process_group)
    expected = [torch.stack(everyones(case, slot)).reshape(concatenated(case)) for slot in range(3)]
    return Started(manager.works, outputs, expected)


def all_gather_coalesced(case: Case) -> Started:
    """The list form: outputs[rank][i] is that rank's i-th tensor."""
    shapes = [case.shape, (3, *case.shape), (1,)]
    inputs = [case.place(case.data(case.rank, slot, shape)) for slot, shape in enumerate(shapes)]
    outputs = [[case.empty(shape) for shape in shapes] for _ in range(case.size)]
    future = dist.all_gather_coalesced(outputs, inputs, group=case.process_group, async_op=case.is_async)
    expected = [case.data(rank, slot, shape) for rank in range(case.size) for slot, shape in enumerate(shapes)]
    return Started(works_of(future), [t for row in outputs for t in row], expected)
