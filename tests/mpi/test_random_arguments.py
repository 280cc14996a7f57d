"""Random calls: each gives the right result, or the documented error on the rank that made the mistake.

All ranks draw the same ones, by the tests' seed. MPIPLUS_TEST_RANDOM_CALLS sets how many each test makes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, LAYOUTS, Case
from expected import makes_sense
from groups import RANKS
from operation_table import MOVEMENT, REDUCTION, TABLE, of_kind
from sampling import count, dice
from started import run_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*ComplexHalf:UserWarning", "ignore::UserWarning"),
    pytest.mark.timeout(600),
]
IN_FULL, SOME = (1200, 120) if RANKS == 2 else (100, 25)
CALLS = int(os.environ.get("MPIPLUS_TEST_RANDOM_CALLS", "0")) or count(IN_FULL, SOME)
Draw = Callable[[random.Random], Any]
ones = torch.ones


def test_right_calls(all_groups) -> None:
    chance = dice("right calls")
    for _ in range(CALLS):
        operation = chance.choice(of_kind(MOVEMENT, REDUCTION))
        op_name = chance.choice(operation.op_names or ("SUM",))
        dtypes = operation.dtypes or [d for d in DTYPES if operation.kind == MOVEMENT or makes_sense(d, op_name)]
        shape = tuple(
            chance.choice((0, 1, chance.randint(2, 9), chance.randint(0, 40))) for _ in range(chance.randint(0, 4))
        )
        shape = chance.choice(operation.shapes or (shape,))
        how = chance.choice(list(dtypes)), shape, chance.choice(LAYOUTS), chance.choice(operation.modes), op_name
        group = all_groups.get(chance.choice(("world", "reversed", "even_odd", "alone", "rotated")))
        if group is not None and group.size >= operation.min_size:
            case = Case(group, *how)
            assert list(run_case(operation, case)) == [], f"{operation} {case}"


# ---- calls that are wrong ----


def many(count: int) -> list[torch.Tensor]:
    return [ones(4) for _ in range(count)]


def among(*things: Any) -> Draw:
    return lambda chance: chance.choice(things)


NOT_A_TENSOR = (None, 3, 2.5, "x", b"x", [1.0], (), {}, np.ones(4), object(), torch.float32, ones)
STRANGE_TENSORS = (torch.ones(4).to_mkldnn(), torch.eye(4).to_sparse_csr())
TENSOR = among(*NOT_A_TENSOR, *STRANGE_TENSORS)
RANK = among(RANKS, RANKS + 7, -2, 1 << 40, -(1 << 70), "0", 1.5, [0], object())
OPERATION = among("sum", 7, object(), [dist.ReduceOp.SUM], torch.add, dist.ReduceOp.BAND, dist.ReduceOp.BXOR)
TAG = among(-1, -5, 1 << 40, 1 << 70, "1", 2.5, object())
SPLITS = among([1] * (RANKS + 1), [-4] + [4] * RANKS, [5] * RANKS, ["4"] * RANKS, [2.5] * RANKS, 4, object())


def other_than(*counts: int) -> Draw:
    """What is no tensor for any operation, or one of a length or dtype that does not go with the other arguments."""
    unfit = [*map(ones, counts), ones(counts[0] - 1, dtype=torch.int64)]
    return lambda chance: chance.choice(unfit) if chance.random() < 0.5 else TENSOR(chance)


def lists(length: int) -> Draw:
    def draw(chance: random.Random) -> Any:
        last = chance.choice((TENSOR(chance), ones(4, dtype=torch.int64)))
        wrong = [ones(length) for _ in range(RANKS)], many(RANKS + 1), many(RANKS - 1), [*many(RANKS - 1), last]
        return chance.choice((*wrong, chance.choice((3, "x", object(), ones(4, 4)[0, 0]))))

    return draw


MESSAGE = (lambda me: [ones(4), (me + 1) % RANKS, None, 0], [TENSOR, RANK, None, TAG])
ROOTED = (lambda me: [ones(4), many(RANKS), me], [TENSOR, lists(5), RANK])
# An operation's arguments in a right call, and for each how to draw a wrong one (None: leave it).
ROWS: dict[str, tuple[Callable[[int], list[Any]], list[Draw | None]]] = {
    "all_reduce": (lambda me: [ones(4), dist.ReduceOp.SUM], [TENSOR, OPERATION]),
    "broadcast": (lambda me: [ones(4), 0], [TENSOR, RANK]),
    "reduce": (lambda me: [ones(4), 0, dist.ReduceOp.SUM], [TENSOR, RANK, OPERATION]),
    "all_gather": (lambda me: [many(RANKS), ones(4)], [lists(5), TENSOR]),
    "all_gather_into_tensor": (lambda me: [ones(4 * RANKS), ones(4)], [other_than(4 * RANKS + 7, 0), other_than(6)]),
    "gather": ROOTED,
    "scatter": ROOTED,
    "reduce_scatter": (lambda me: [ones(4), many(RANKS), dist.ReduceOp.SUM], [TENSOR, lists(5), OPERATION]),
    "reduce_scatter_tensor": (
        lambda me: [ones(4), ones(4 * RANKS), dist.ReduceOp.SUM],
        [other_than(11, 0), other_than(4 * RANKS + 1), OPERATION],
    ),
    "all_to_all": (lambda me: [many(RANKS), many(RANKS)], [lists(5), lists(6)]),
    "all_to_all_single": (
        lambda me: [ones(4 * RANKS), ones(4 * RANKS), [4] * RANKS, [4] * RANKS],
        [other_than(4 * RANKS + 7, 0), other_than(4 * RANKS + 1), SPLITS, SPLITS],
    ),
    **dict.fromkeys(("send", "recv", "isend", "irecv"), MESSAGE),
}


def test_wrong_calls(all_groups) -> None:
    """Nobody else calls it: what does not raise at once would wait for the others in vain."""
    chance = dice("wrong calls")
    for _ in range(CALLS):
        name, offender = chance.choice(sorted(ROWS)), chance.randrange(RANKS)
        right, ways = ROWS[name]
        places = [place for place, way in enumerate(ways) if way is not None]
        chosen = chance.sample(places, chance.randint(1, len(places)))
        wrong = {place: draw(chance) for place in chosen if (draw := ways[place])}
        if all_groups["world"].rank == offender:
            arguments = [wrong.get(place, argument) for place, argument in enumerate(right(offender))]
            with pytest.raises((ValueError, TypeError, RuntimeError, OverflowError)) as caught:
                getattr(dist, name)(*arguments)
                pytest.fail(f"{name} with {wrong!r} was taken")
            assert not isinstance(caught.value, dist.DistBackendError), f"{name}: it was sent: {caught.value}"
            ours = type(caught.value).__module__ != "builtins"
            assert ("group '" if ours else " ") in str(caught.value), f"{name} with {wrong!r}: {caught.value}"
        assert list(run_case(TABLE["all_reduce"], Case(all_groups["world"]))) == []
