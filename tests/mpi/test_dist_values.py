"""Values arrive exactly as they were, of the type they were."""

from __future__ import annotations

from datetime import datetime, timezone

import numpy as np
import pytest
import torch
from dist_groups import Talk, in_each_group, talk_of_family  # noqa: F401 - a fixture
from groups import only_up_to

from torchmpi_plugin import dist as helpers

pytestmark = [pytest.mark.timeout(60), only_up_to(4), in_each_group]

VALUES = [
    2**53 + 1,
    2**24 + 1,
    -(2**200),
    0.1,
    1e-310,
    10**12,
    True,
    False,
    None,
    "",
    "text with ü and \udc80",
    b"\x00\xff",
    3 - 4j,
    (1, 2.5, None),
    {"nested": [{"deep": (1, {2, 3})}], 4: None},
    "long " * 10_000,
    list(range(500)),
    datetime(2024, 2, 29, tzinfo=timezone.utc),
    torch.float16,
    torch.Size([2, 3]),
    np.float64(0.1),
    np.int64(2**62),
]
ARRAYS = [
    np.arange(7, dtype=np.int16),
    np.array(["a", "bc"]),
    torch.tensor([0.1, float("nan"), -0.0], dtype=torch.bfloat16),
    torch.arange(5000).reshape(50, 100)[::2],
    torch.tensor([[True], [False]]),
]


def assert_same(got, wanted) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)
    else:
        assert got == wanted
        assert repr(got) == repr(wanted)


def other(value, place: int):
    """What rank number ``place`` contributes: values of different kinds and lengths meet."""
    everything = [*VALUES, *ARRAYS]
    index = next(i for i, candidate in enumerate(everything) if candidate is value)
    return everything[(index + place) % len(everything)]


def test_compute_and_broadcast(talk: Talk) -> None:
    for place, value in enumerate([*VALUES, *ARRAYS]):
        root = talk.ranks[place % talk.size]
        calls = []

        def fn(value=value, calls=calls):
            calls.append(1)
            return value

        assert_same(helpers.compute_and_broadcast(fn, rank=root, group=talk.group), value)
        assert len(calls) == (talk.rank == root)


def test_gather_from_all_ranks(talk: Talk) -> None:
    for index, value in enumerate([*VALUES, *ARRAYS]):
        root = talk.ranks[index % talk.size]
        size = (None, 1, talk.size)[index % 3]
        got = helpers.gather_from_all_ranks(lambda v=value: other(v, talk.place), size, root, group=talk.group)
        if talk.rank != root:
            assert got is None
            continue
        assert len(got) == talk.size
        for place, item in enumerate(got):
            assert_same(item, other(value, place))


def test_reduce_and_broadcast(talk: Talk) -> None:
    for value in VALUES:
        got = helpers.reduce_and_broadcast(lambda v=value: other(v, talk.place), lambda values: values, talk.group)
        for place, item in enumerate(got):
            assert_same(item, other(value, place))
    assert helpers.reduce_and_broadcast(lambda: 2**53 + talk.place, sum, group=talk.group) == sum(
        2**53 + place for place in range(talk.size)
    )


def test_reduction_is_called_once(talk: Talk) -> None:
    calls = []
    helpers.reduce_and_broadcast(lambda: 1, calls.append, group=talk.group)
    assert len(calls) == (talk.place == 0)


def test_all_gather_object(talk: Talk) -> None:
    for value in [*VALUES, *ARRAYS]:
        got = helpers.all_gather_object(other(value, talk.place), group=talk.group)
        assert len(got) == talk.size
        for place, item in enumerate(got):
            assert_same(item, other(value, place))


def test_broadcast_object_list(talk: Talk) -> None:
    wanted = [*VALUES, *ARRAYS]
    for src in talk.ranks:
        objects = list(wanted) if talk.rank == src else [None] * len(wanted)
        assert helpers.broadcast_object_list(objects, src=src, group=talk.group) is None
        for got, value in zip(objects, wanted, strict=True):
            assert_same(got, value)


def test_defaults_mean_the_first_rank_of_the_group(talk: Talk) -> None:
    first = 0 if 0 in talk.ranks else talk.ranks[0]
    assert helpers.compute_and_broadcast(lambda: talk.rank, group=talk.group) == first
    gathered = helpers.gather_scalar_from_all_ranks(lambda: talk.rank, group=talk.group)
    assert gathered == (talk.ranks if talk.rank == first else None)
    names = [talk.rank]
    helpers.broadcast_object_list(names, group=talk.group)
    assert names == [first]
