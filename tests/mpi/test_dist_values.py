"""Values arrive exactly as they were, of the type they were; Composer's tensor collectives, and ml's exchange."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest
import torch
from dist_groups import Talk, in_each_group, talk_of_family  # noqa: F401 - a fixture
from groups import only_up_to

from torchmpi_plugin import dist as helpers

pytestmark = [pytest.mark.timeout(60), only_up_to(4), in_each_group]

VALUES = [
    *(2**53 + 1, -(2**200), 0.1, 1e-310, True, None, "", "text with ü and \udc80", b"\x00\xff", 3 - 4j, (1, 2.5, None)),
    *({"nested": [{"deep": (1, {2, 3})}], 4: None}, "long " * 10_000, list(range(500))),
    *(datetime(2024, 2, 29, tzinfo=timezone.utc), torch.float16, torch.Size([2, 3]), np.float64(0.1), np.int64(2**62)),
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
    calls: list[object] = []
    for value in VALUES:
        got = helpers.reduce_and_broadcast(
            lambda v=value: other(v, talk.place), lambda values: calls.append(1) or values, talk.group
        )
        for place, item in enumerate(got):
            assert_same(item, other(value, place))
    assert len(calls) == len(VALUES) * (talk.place == 0)
    assert helpers.reduce_and_broadcast(lambda: 2**53 + talk.place, sum, group=talk.group) == sum(
        2**53 + place for place in range(talk.size)
    )


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


REDUCTIONS: dict[str, Any] = {"SUM": sum, "PRODUCT": math.prod, "MIN": min, "MAX": max}


def test_all_reduce(talk: Talk) -> None:
    for name, compute in REDUCTIONS.items():
        for spelling in (name, name.lower()):
            tensor = torch.full((3, 2), float(talk.place + 2))
            assert helpers.all_reduce(tensor, spelling, group=talk.group) is None
            assert tensor.tolist() == [[compute([float(place + 2) for place in range(talk.size)])] * 2] * 3
    for name in ("MEAN", "", "PREMUL_SUM", "__class__", "sum "):
        with pytest.raises(ValueError, match="must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, not"):
            helpers.all_reduce(torch.ones(1), name, group=talk.group)


def test_strided_tensors(talk: Talk) -> None:
    base, wanted = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)
    helpers.all_reduce(base.t()[::2], group=talk.group)
    wanted.t()[::2] *= talk.size
    assert base.tolist() == wanted.tolist()
    column = torch.full((4, 4), float(talk.place))[:, 1]
    assert helpers.broadcast(column, src=talk.ranks[-1], group=talk.group) is None
    assert column.tolist() == [talk.size - 1] * 4
    gathered = helpers.all_gather(torch.full((3, 4), talk.place).t()[::2], group=talk.group)
    assert [t.tolist() for t in gathered] == [[[place] * 3] * 2 for place in range(talk.size)]


def test_all_to_all(talk: Talk) -> None:
    rows = torch.tensor([[talk.place, to, 0.5] for to in range(talk.size) for _ in range(2)])
    got = helpers.all_to_all(rows, group=talk.group)
    assert got.tolist() == [[source, talk.place, 0.5] for source in range(talk.size) for _ in range(2)]
    for tensor in (torch.tensor(1.0), torch.ones(talk.size + 1)) if talk.size > 1 else (torch.tensor(1.0),):
        with pytest.raises(ValueError, match="cannot be split equally over"):
            helpers.all_to_all(tensor, group=talk.group)


def test_gradients_take_the_way_back(talk: Talk) -> None:
    """Second ones too."""
    mine = torch.full((talk.size, 2), talk.place + 1.0, requires_grad=True)
    received = helpers.all_to_all(mine, group=talk.group)
    weights = torch.arange(1.0, talk.size + 1).unsqueeze(1) * (talk.place + 1)
    (slope,) = torch.autograd.grad((received.pow(3) * weights).sum(), mine, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), mine)
    factors = (talk.place + 1) * torch.arange(1.0, talk.size + 1).unsqueeze(1)
    assert torch.equal(slope, 3 * mine**2 * factors) and torch.equal(curve, 6 * mine * factors)
