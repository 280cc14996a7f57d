"""The collectives of torch.distributed as a table: what each rank gives, what it gets of it, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, Shape
from expected import PREFIX_OPS, REDUCE_OPS, reduced
from started import Started, works_of
from torch.distributed.distributed_c10d import _coalescing_manager

import torchmpi_plugin

# 2.13 renamed these functions and deprecated their old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Tensors = list[torch.Tensor]
#: The slots of what a coalesced call gives in its second tensor begin here, of the third at twice this.
NEXT = 100


@dataclass(frozen=True)
class Everyone:
    """All ranks of a call, as one of them sees it.

    of: the block of a rank that has a slot.
    op_name: "" where sums only need their shape.
    """

    of: Callable[[int, int], torch.Tensor]
    rank: int
    size: int
    root: int = 0
    op_name: str = "SUM"

    def column(self, slot: int = 0) -> Tensors:
        return [self.of(rank, slot) for rank in range(self.size)]

    def total(self, slot: int = 0, ranks: int | None = None) -> torch.Tensor:
        return reduced(self.column(slot)[:ranks], self.op_name) if self.op_name else self.of(0, slot)


@dataclass
class Call:
    """One rank's call, with its tensors."""

    everyone: Everyone
    given: Tensors
    taken: Tensors
    op: Any
    group: Any
    is_async: bool

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.is_async}

    @property
    def root(self) -> int:
        return dist.get_global_rank(self.group, self.everyone.root)

    @property
    def own(self) -> torch.Tensor:
        """The only one of a call in place."""
        return (self.given or self.taken)[0]

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """Rows from each rank, and to each."""
        sees = self.everyone
        return list(map(rows_of, sees.column(sees.rank))), [rows_of(sees.of(sees.rank, to)) for to in range(sees.size)]


@dataclass(frozen=True)
class Collective:
    """A row of the table.

    call: makes it.
    wanted: a rank's results; a list in place of a tensor: one that has these blocks in it.
    given: the slots of what a rank gives, for a group's size; a list: the blocks of one tensor.
    rooted: what only the root has: "given" or "taken".
    in_place: the results come where the inputs are.
    rows: of a rank's block that has a slot, by the rows of the case's shape; all have that shape otherwise.
    stacked: blocks of one tensor have a dimension of their own.
    """

    call: Callable[[Call], Any]
    wanted: Callable[[Everyone], list[Any]]
    given: Callable[[int], list[Any]] = lambda size: [0]
    op_names: tuple[str, ...] = ()
    rooted: str = ""
    in_place: bool = False
    rows: Callable[[int, int, int], int] | None = None
    stacked: bool = False

    def shape(self, shape: Shape, rank: int, slot: int) -> Shape:
        """Of a block. Of several tensors each has another one."""
        if self.given is three and slot:
            return (3, *shape) if slot == NEXT else (1,)
        return (self.rows(shape[0] if shape else 1, rank, slot), *shape[1:]) if self.rows else shape

    def laid_out(self, blocks: torch.Tensor | Tensors) -> torch.Tensor:
        """By their bytes: torch cannot copy elements of every dtype."""
        if isinstance(blocks, torch.Tensor):
            return blocks
        together = torch.cat([block.reshape(-1).view(torch.uint8) for block in blocks]).view(blocks[0].dtype)
        rows = (len(blocks), *blocks[0].shape[:1]) if self.stacked else (sum(map(rows_of, blocks)),)
        return together.view(*rows, *blocks[0].shape[1:])

    def all_given(self, sees: Everyone) -> Tensors:
        if self.rooted == "given" and sees.rank != sees.root:
            return []

        def made(slot: Any) -> Any:
            return sees.of(sees.rank, slot) if isinstance(slot, int) else [sees.of(sees.rank, each) for each in slot]

        return [self.laid_out(made(slot)) for slot in self.given(sees.size)]

    def all_taken(self, sees: Everyone) -> Tensors:
        if self.rooted == "taken" and sees.rank != sees.root:
            return []
        return [self.laid_out(blocks) for blocks in self.wanted(sees)]

    def start(self, case: Case) -> Started:
        """As a row of operation_table.py."""
        data = case.number if self.op_names else case.data
        sees = Everyone(
            lambda rank, slot: data(rank, slot, self.shape(case.shape, rank, slot)),
            *(case.rank, case.size, case.root, case.op_name),
        )
        # What cannot be reduced is for the call to refuse.
        given, shaped = self.all_given(sees), self.all_taken(replace(sees, op_name=""))
        inputs = [case.place(tensor) for tensor in given]
        in_place = self.in_place and inputs
        outputs = inputs[: len(shaped)] if in_place else [case.empty(tensor.shape) for tensor in shaped]
        work = self.call(Call(sees, inputs, outputs, case.op, case.process_group, case.is_async))
        expected = self.all_taken(sees) if self.op_names else shaped
        return Started(works_of(work), outputs, expected, [] if in_place else list(zip(inputs, given, strict=True)))


def rows_of(block: torch.Tensor) -> int:
    return len(block) if block.ndim else 1


def each(size: int) -> list[Any]:
    return list(range(size))


def whole(size: int) -> list[Any]:
    return [range(size)]


def three(size: int) -> list[Any]:
    return [0, NEXT, 2 * NEXT]


def three_wholes(size: int) -> list[Any]:
    return [range(first, first + size) for first in three(size)]


def some(rows: int, rank: int, slot: int) -> int:
    """Uneven, and sometimes none."""
    return (rank + 2 * slot) % 3 * rows


def coalesced(function: Callable[[Call, torch.Tensor, torch.Tensor], Any]) -> Callable[[Call], Any]:
    """In one coalescing block, for each tensor that is given and its result."""

    def call(c: Call) -> Any:
        with _coalescing_manager(c.group, async_ops=c.is_async) as manager:
            for given, taken in zip(c.given, c.taken, strict=True):
                function(c, given, taken)
        return manager

    return call


def all_gather(c: Call) -> Any:
    return dist.all_gather(c.taken, c.given[0], **c.how)


moving, reducing = Collective, partial(Collective, op_names=REDUCE_OPS)
prefix = partial(Collective, op_names=PREFIX_OPS, in_place=True)
into_one = moving(lambda c: all_gather_single(c.taken[0], c.given[0], **c.how), lambda sees: [sees.column()])
lists = moving(lambda c: dist.all_to_all(c.taken, c.given, **c.how), lambda sees: sees.column(sees.rank), each)
scattered = reducing(
    lambda c: reduce_scatter_single(c.taken[0], c.given[0], c.op, **c.how), lambda sees: [sees.total(sees.rank)], whole
)

COLLECTIVES = {
    "broadcast": moving(
        lambda c: dist.broadcast(c.own, src=c.root, **c.how), lambda sees: [sees.of(sees.root, 0)],
        rooted="given", in_place=True,
    ),
    "all_gather": moving(all_gather, Everyone.column),
    "all_gather_uneven": moving(all_gather, Everyone.column, rows=lambda rows, rank, slot: rows + rank),
    "all_gather_into_tensor": into_one,
    "all_gather_into_tensor_stacked": replace(into_one, stacked=True),
    "gather": moving(
        lambda c: dist.gather(c.given[0], c.taken or None, dst=c.root, **c.how), Everyone.column, rooted="taken"
    ),
    "scatter": moving(
        lambda c: dist.scatter(c.taken[0], c.given or None, src=c.root, **c.how),
        lambda sees: [sees.of(sees.root, sees.rank)], each, rooted="given",
    ),
    "all_to_all": lists,
    "all_to_all_uneven": replace(lists, rows=some),
    "all_to_all_single": moving(
        lambda c: dist.all_to_all_single(c.taken[0], c.given[0], **c.how), lambda sees: [sees.column(sees.rank)], whole
    ),
    "all_to_all_single_splits": moving(
        lambda c: dist.all_to_all_single(c.taken[0], c.given[0], *c.splits, **c.how),
        lambda sees: [sees.column(sees.rank)], whole, rows=some,
    ),
    "coalesced_all_gather_into_tensor": moving(
        coalesced(lambda c, given, taken: all_gather_single(taken, given, group=c.group)),
        lambda sees: [sees.column(slot) for slot in three(sees.size)], three,
    ),
    "all_gather_coalesced": moving(  # the list form: outputs[rank][i] is that rank's i-th tensor
        lambda c: dist.all_gather_coalesced([c.taken[i : i + 3] for i in range(0, len(c.taken), 3)], c.given, **c.how),
        lambda sees: [sees.of(rank, slot) for rank in range(sees.size) for slot in three(sees.size)], three,
    ),
    "all_reduce": reducing(
        lambda c: dist.all_reduce(c.own, c.op, **c.how), lambda sees: [sees.total()], in_place=True
    ),
    "reduce": reducing(  # what is left in the others' tensors is not defined
        lambda c: dist.reduce(c.own, dst=c.root, op=c.op, **c.how), lambda sees: [sees.total()],
        rooted="taken", in_place=True,
    ),
    "reduce_scatter": reducing(
        lambda c: dist.reduce_scatter(c.taken[0], c.given, c.op, **c.how), lambda sees: [sees.total(sees.rank)], each
    ),
    "scan": prefix(
        lambda c: torchmpi_plugin.scan(c.own, c.op, c.group, c.is_async), lambda sees: [sees.total(0, sees.rank + 1)]
    ),
    "exscan": prefix(
        lambda c: torchmpi_plugin.exscan(c.own, c.op, c.group, c.is_async),
        lambda sees: [sees.total(0, sees.rank) if sees.rank else sees.of(0, 0)],  # where it stays as it is
    ),
    "reduce_scatter_tensor": scattered,
    "reduce_scatter_tensor_stacked": replace(scattered, stacked=True),
    "coalesced_all_reduce": reducing(
        coalesced(lambda c, given, taken: dist.all_reduce(given, c.op, group=c.group)),
        lambda sees: [sees.total(slot) for slot in three(sees.size)], three, in_place=True,
    ),
    "all_reduce_coalesced": reducing(  # the deprecated function, which gives a future instead of a work
        lambda c: dist.all_reduce_coalesced(c.given, c.op, **c.how),
        lambda sees: [sees.total(slot) for slot in three(sees.size)], three, in_place=True,
    ),
    "coalesced_reduce_scatter_tensor": reducing(
        coalesced(lambda c, given, taken: reduce_scatter_single(taken, given, c.op, group=c.group)),
        lambda sees: [sees.total(first + sees.rank) for first in three(sees.size)], three_wholes,
    ),
}  # fmt: skip
