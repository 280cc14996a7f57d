"""Random calls: each gives the right result, or the documented error on the rank that made the mistake.

All ranks draw the same examples, by the tests' seed (sampling.py), so nothing is shrunk: a failure shows the example as
it was. MPIPLUS_TEST_RANDOM_CALLS sets how many each test makes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, LAYOUTS, Case
from expected import makes_sense
from groups import RANKS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from operation_table import MOVEMENT, REDUCTION, TABLE, of_kind
from sampling import count, seed
from started import run_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*ComplexHalf:UserWarning", "ignore::UserWarning"),
    pytest.mark.timeout(600),
]
IN_FULL, SOME = (1200, 120) if RANKS == 2 else (100, 25)
CALLS = int(os.environ.get("MPIPLUS_TEST_RANDOM_CALLS", "0")) or count("random arguments: calls", IN_FULL, SOME)
random_calls = settings(
    max_examples=CALLS,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# ---- calls that are right ----

PARTS = ("family", "operation", "dtype", "shape", "layout", "mode", "op_name")


@st.composite
def right_calls(draw: Any) -> dict[str, Any]:
    operation = draw(st.sampled_from(of_kind(MOVEMENT, REDUCTION)))
    op_name = draw(st.sampled_from(operation.op_names or ("SUM",)))
    dtypes = operation.dtypes or [d for d in DTYPES if operation.kind == MOVEMENT or makes_sense(d, op_name)]
    if operation.shapes:
        shape = draw(st.sampled_from(operation.shapes))
    else:
        shape = tuple(draw(st.lists(st.integers(0, 9) | st.integers(0, 40), max_size=4)))
    return {
        "family": draw(st.sampled_from(("world", "reversed", "even_odd", "alone", "rotated"))),
        "operation": operation,
        "dtype": draw(st.sampled_from(list(dtypes))),
        "shape": shape,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "mode": draw(st.sampled_from(operation.modes)),
        "op_name": op_name,
    }


@with_seed(seed())
@random_calls
@given(right_calls())
def test_right_calls(all_groups, call: dict[str, Any]) -> None:
    group, operation = all_groups.get(call["family"]), call["operation"]
    if group is None or group.size < operation.min_size:
        return
    case = Case(group, *(call[part] for part in PARTS[2:]))
    assert list(run_case(operation, case)) == [], f"{operation} {case}"


# ---- calls that are wrong ----


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def many(count: int) -> list[torch.Tensor]:
    return [ones(4) for _ in range(count)]


NOT_A_TENSOR = (None, 3, 2.5, "x", b"x", [1.0], (), {}, np.ones(4), object(), torch.float32, ones)
STRANGE_TENSORS = (
    lambda: torch.ones(4, device="meta"),
    lambda: torch.eye(3).to_sparse_csr(),
)
NOT_A_RANK = (RANKS, RANKS + 7, -2, 1 << 40, -(1 << 70), "0", 1.5, [0], object())
NOT_AN_OPERATION = ("sum", 7, object(), [dist.ReduceOp.SUM], torch.add, dist.ReduceOp.BAND, dist.ReduceOp.BXOR)
NOT_A_TAG = (-1, -5, 1 << 40, 1 << 70, "1", 2.5, object())
NOT_SPLITS = ([1] * (RANKS + 1), [-4] + [4] * RANKS, [5] * RANKS, ["4"] * RANKS, [2.5] * RANKS, 4, object())


def bad_tensors(draw: Any) -> Any:
    place = draw(st.integers(0, len(NOT_A_TENSOR) + len(STRANGE_TENSORS) - 1))
    return NOT_A_TENSOR[place] if place < len(NOT_A_TENSOR) else STRANGE_TENSORS[place - len(NOT_A_TENSOR)]()


def or_else(*unfit: Callable[[], torch.Tensor]) -> Callable[[Any], Any]:
    """What is no tensor for any operation, or one that does not go with the call's other arguments."""
    return lambda draw: draw(st.sampled_from(unfit))() if draw(st.booleans()) else bad_tensors(draw)


def bad_lists(draw: Any, length: int = 5) -> Any:
    wrong = [
        lambda: [ones(length) for _ in range(RANKS)],
        lambda: many(RANKS + 1),
        lambda: many(RANKS - 1),
        lambda: [*many(RANKS - 1), bad_tensors(draw)],
        lambda: [*many(RANKS - 1), ones(4, dtype=torch.int64)],
        lambda: draw(st.sampled_from((3, "x", object(), ones(4, 4)[0, 0]))),
    ]
    return draw(st.sampled_from(wrong))()


def among(things: tuple[Any, ...]) -> Callable[[Any], Any]:
    return lambda draw: draw(st.sampled_from(things))


def bad_outputs(count: int) -> Callable[[Any], Any]:
    return or_else(lambda: ones(count + 7), lambda: ones(count, dtype=torch.int64), lambda: ones(0))


RANK, OPERATION, TAG, SPLITS = among(NOT_A_RANK), among(NOT_AN_OPERATION), among(NOT_A_TAG), among(NOT_SPLITS)
# An operation, the arguments of a right call, and for each how to draw a wrong one (None: leave it).
Row = tuple[Callable[..., Any], Callable[[int], list[Any]], list[Callable[[Any], Any] | None]]
ROWS: dict[str, Row] = {
    "all_reduce": (dist.all_reduce, lambda me: [ones(4), dist.ReduceOp.SUM], [bad_tensors, OPERATION]),
    "broadcast": (dist.broadcast, lambda me: [ones(4), 0], [bad_tensors, RANK]),
    "reduce": (dist.reduce, lambda me: [ones(4), 0, dist.ReduceOp.SUM], [bad_tensors, RANK, OPERATION]),
    "all_gather": (dist.all_gather, lambda me: [many(RANKS), ones(4)], [bad_lists, bad_tensors]),
    "all_gather_into_tensor": (
        dist.all_gather_into_tensor,
        lambda me: [ones(4 * RANKS), ones(4)],
        [bad_outputs(4 * RANKS), or_else(lambda: ones(6))],
    ),
    "gather": (dist.gather, lambda me: [ones(4), many(RANKS), me], [bad_tensors, bad_lists, RANK]),
    "scatter": (dist.scatter, lambda me: [ones(4), many(RANKS), me], [bad_tensors, bad_lists, RANK]),
    "reduce_scatter": (
        dist.reduce_scatter,
        lambda me: [ones(4), many(RANKS), dist.ReduceOp.SUM],
        [bad_tensors, bad_lists, OPERATION],
    ),
    "reduce_scatter_tensor": (
        dist.reduce_scatter_tensor,
        lambda me: [ones(4), ones(4 * RANKS), dist.ReduceOp.SUM],
        [bad_outputs(4), or_else(lambda: ones(4 * RANKS + 1)), OPERATION],
    ),
    "all_to_all": (
        dist.all_to_all,
        lambda me: [many(RANKS), many(RANKS)],
        [bad_lists, lambda draw: bad_lists(draw, length=6)],
    ),
    "all_to_all_single": (
        dist.all_to_all_single,
        lambda me: [ones(4 * RANKS), ones(4 * RANKS), [4] * RANKS, [4] * RANKS],
        [bad_outputs(4 * RANKS), or_else(lambda: ones(4 * RANKS + 1)), SPLITS, SPLITS],
    ),
    "send": (dist.send, lambda me: [ones(4), (me + 1) % RANKS, None, 0], [bad_tensors, RANK, None, TAG]),
    "recv": (dist.recv, lambda me: [ones(4), (me + 1) % RANKS, None, 0], [bad_tensors, RANK, None, TAG]),
    "isend": (dist.isend, lambda me: [ones(4), (me + 1) % RANKS, None, 0], [bad_tensors, RANK, None, TAG]),
    "irecv": (dist.irecv, lambda me: [ones(4), (me + 1) % RANKS, None, 0], [bad_tensors, RANK, None, TAG]),
}


@st.composite
def wrong_calls(draw: Any) -> tuple[str, int, dict[int, Any]]:
    """An operation, the rank that calls it alone, and its wrong arguments by their places."""
    name = draw(st.sampled_from(sorted(ROWS)))
    _, _, ways = ROWS[name]
    places = draw(st.sets(st.sampled_from([i for i, way in enumerate(ways) if way is not None]), min_size=1))
    return name, draw(st.integers(0, RANKS - 1)), {place: ways[place](draw) for place in sorted(places)}


@with_seed(seed())
@random_calls
@given(wrong_calls())
def test_wrong_calls(all_groups, call: tuple[str, int, dict[int, Any]]) -> None:
    """Nobody else calls it: what does not raise at once would wait for the others in vain."""
    name, offender, wrong = call
    if all_groups["world"].rank == offender:
        function, right, _ = ROWS[name]
        arguments = [wrong.get(place, argument) for place, argument in enumerate(right(offender))]
        with pytest.raises((ValueError, TypeError, RuntimeError, OverflowError)) as caught:
            function(*arguments)
        assert not isinstance(caught.value, dist.DistBackendError), f"{name}: it was sent: {caught.value}"
        assert str(caught.value), f"{name} with {wrong!r}: an error without a word"
    assert list(run_case(TABLE["all_reduce"], Case(all_groups["world"]))) == []


#: What is wrong though each argument by itself is right; of a rank ``me``.
MISTAKES: dict[str, Callable[[int], object]] = {
    "gather: outputs on another rank": lambda me: dist.gather(ones(6), many(RANKS), (me + 1) % RANKS),
    "gather: no outputs": lambda me: dist.gather(ones(6), None, me),
    "gather: outputs of another dtype": lambda me: dist.gather(ones(4).int(), many(RANKS), me),
    "scatter: no inputs": lambda me: dist.scatter(ones(6), None, me),
    "scatter: inputs of another dtype": lambda me: dist.scatter(ones(4).int(), many(RANKS), me),
    "reduce_scatter: inputs of another dtype": lambda me: dist.reduce_scatter(ones(4).int(), many(RANKS)),
    "MAX of complex": lambda me: dist.all_reduce(ones(6, dtype=torch.complex64), dist.ReduceOp.MAX),
    "AVG of bool": lambda me: dist.reduce(ones(6, dtype=torch.bool), me, dist.ReduceOp.AVG),
    "broadcast, rank in group": lambda me: dist.broadcast(ones(6), group_src=RANKS),
    "recv from anyone with a negative tag": lambda me: dist.recv(ones(6), None, tag=-1),
    "batch with a bad rank": lambda me: dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(6), RANKS)]),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_arguments_that_do_not_go_together(mistake: str, all_groups) -> None:
    """As above, on rank 0."""
    if (me := all_groups["world"].rank) == 0:
        with pytest.raises((ValueError, TypeError)) as caught:
            MISTAKES[mistake](me)
        assert len(str(caught.value)) > 15
    assert list(run_case(TABLE["all_reduce"], Case(all_groups["world"]))) == []
