"""Composer's tensor collectives, and ml's differentiable exchange."""

from __future__ import annotations

import pytest
import torch
from dist_groups import Talk, in_each_group, talk_of_family  # noqa: F401 - a fixture
from groups import only_up_to

from torchmpi_plugin import dist as helpers

pytestmark = [pytest.mark.timeout(60), only_up_to(4), in_each_group]

REDUCTIONS = {"SUM": sum, "PRODUCT": lambda v: torch.tensor(v).prod().item(), "MIN": min, "MAX": max}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_all_reduce(talk: Talk, name: str) -> None:
    for spelling in (name, name.lower()):
        tensor = torch.full((3, 2), float(talk.place + 2))
        assert helpers.all_reduce(tensor, spelling, group=talk.group) is None
        wanted = REDUCTIONS[name]([float(place + 2) for place in range(talk.size)])
        assert tensor.tolist() == [[wanted] * 2] * 3


def test_all_reduce_of_bits(talk: Talk) -> None:
    tensor = torch.tensor([1 << talk.place])
    helpers.all_reduce(tensor, "BOR", group=talk.group)
    assert tensor.tolist() == [(1 << talk.size) - 1]


@pytest.mark.parametrize("name", ["MEAN", "", "PREMUL_SUM", "__class__", "sum "])
def test_all_reduce_with_an_unknown_operation(talk: Talk, name: str) -> None:
    with pytest.raises(ValueError, match="must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, not"):
        helpers.all_reduce(torch.ones(1), name, group=talk.group)


def test_strided_tensors(talk: Talk) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    view = base.t()[::2]
    helpers.all_reduce(view, group=talk.group)
    wanted = torch.arange(12.0).reshape(3, 4)
    wanted.t()[::2] *= talk.size
    assert base.tolist() == wanted.tolist()
    column = torch.full((4, 4), float(talk.place))[:, 1]
    helpers.broadcast(column, src=talk.ranks[-1], group=talk.group)
    assert column.tolist() == [talk.size - 1] * 4
    gathered = helpers.all_gather(torch.full((3, 4), talk.place).t()[::2], group=talk.group)
    assert [t.tolist() for t in gathered] == [[[place] * 3] * 2 for place in range(talk.size)]


def test_broadcast_from_each_rank(talk: Talk) -> None:
    for src in talk.ranks:
        tensor = torch.tensor([talk.rank])
        assert helpers.broadcast(tensor, src, group=talk.group) is None
        assert tensor.tolist() == [src]


def test_all_gather_has_the_size_of_the_group(talk: Talk) -> None:
    for shape in ((), (3,), (2, 0), (2, 2)):
        gathered = helpers.all_gather(torch.full(shape, talk.rank), group=talk.group)
        assert [tuple(tensor.shape) for tensor in gathered] == [shape] * talk.size
        assert all((tensor == rank).all() for tensor, rank in zip(gathered, talk.ranks, strict=True))


def test_all_to_all(talk: Talk) -> None:
    rows = torch.tensor([[talk.place, to, 0.5] for to in range(talk.size) for _ in range(2)])
    got = helpers.all_to_all(rows, group=talk.group)
    assert got.tolist() == [[source, talk.place, 0.5] for source in range(talk.size) for _ in range(2)]


def test_all_to_all_of_what_cannot_be_split(talk: Talk) -> None:
    for tensor in (torch.tensor(1.0), torch.ones(talk.size + 1)) if talk.size > 1 else (torch.tensor(1.0),):
        with pytest.raises(ValueError, match="cannot be split equally over"):
            helpers.all_to_all(tensor, group=talk.group)


def test_gradients_take_the_way_back(talk: Talk) -> None:
    mine = torch.zeros(talk.size, 2, requires_grad=True)
    received = helpers.all_to_all(mine, group=talk.group)
    (received * torch.arange(talk.size).unsqueeze(1) * (talk.place + 1)).sum().backward()
    assert mine.grad.tolist() == [[talk.place * (to + 1.0)] * 2 for to in range(talk.size)]


def test_second_derivatives(talk: Talk) -> None:
    mine = torch.full((talk.size, 2), talk.place + 1.0, requires_grad=True)
    cubes = helpers.all_to_all(mine, group=talk.group).pow(3).sum()
    (slope,) = torch.autograd.grad(cubes, mine, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), mine)
    assert slope.eq(3 * mine**2).all() and curve.eq(6 * mine).all()
