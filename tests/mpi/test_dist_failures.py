"""A failure on one rank is an error on all, and the group goes on working."""

from __future__ import annotations

import functools
import threading

import pytest
import torch.distributed as dist
from dist_groups import Talk, expect_failure, in_each_group, talk_of_family  # noqa: F401 - a fixture
from groups import assert_usable, only_up_to

from torchmpi_plugin import dist as helpers
from torchmpi_plugin.errors import RankFailedError

pytestmark = [pytest.mark.timeout(60), only_up_to(4), in_each_group]

LONG = "long words " * 100


def works(talk: Talk) -> None:
    """The group is in step: an operation of torch's and one of ours give the right result."""
    assert_usable(talk.group)
    assert helpers.all_gather_object(talk.rank, group=talk.group) == talk.ranks


def fail_on(failing: int, words: str = "on purpose"):
    if dist.get_rank() == failing:
        raise LookupError(words)
    return "x" * 1000


def read_on(ranks: list[int]) -> str:
    if dist.get_rank() not in ranks:
        raise ModuleNotFoundError("not here")
    return "fine"


class Unreadable:
    """Can be pickled everywhere, and unpickled on some ranks, if any."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = list(ranks)

    def __reduce__(self):
        return read_on, (self.ranks,)


def test_the_function_raises_on_each_rank_in_turn(talk: Talk) -> None:
    for failing in talk.ranks:
        for words in ("on purpose", LONG) if failing == talk.ranks[0] else ("on purpose",):
            calls = [
                lambda g=failing, w=words: helpers.compute_and_broadcast(lambda: fail_on(g, w), g, talk.group),
                lambda g=failing, w=words: helpers.gather_from_all_ranks(lambda: fail_on(g, w), group=talk.group),
                lambda g=failing, w=words: helpers.reduce_and_broadcast(lambda: fail_on(g, w), len, talk.group),
            ]
            for call in calls:
                error = expect_failure(failing, f"LookupError: {words.strip()[:50]}", call)
                assert "in fail_on" in error.traceback
                assert isinstance(error.__cause__, LookupError) == (talk.rank == failing)
                works(talk)


@pytest.mark.parametrize(("kind", "words"), [(threading.Lock, "pickle"), (Unreadable, "unpickled on rank")])
def test_a_value_that_cannot_travel(talk: Talk, kind, words: str) -> None:
    if talk.size == 1:
        return  # nothing travels
    for failing in talk.ranks:
        value = kind() if talk.rank == failing else "fine"
        root = next(rank for rank in talk.ranks if rank != failing)  # nobody unpickles what is its own
        calls = [
            lambda v=value, g=failing: helpers.compute_and_broadcast(lambda: v, g, talk.group),
            lambda v=value, r=root: helpers.gather_from_all_ranks(lambda: v, rank=r, group=talk.group),
            lambda v=value: helpers.all_gather_object(v, talk.group),
            lambda v=value, g=failing: helpers.broadcast_object_list([v], g, talk.group),
        ]
        if failing != talk.ranks[0] or kind is not Unreadable:
            calls.append(lambda v=value: helpers.reduce_and_broadcast(lambda: v, len, talk.group))
        for call in calls:
            expect_failure(failing, words, call)
            works(talk)


@pytest.mark.parametrize(
    ("compute", "words"),
    [(lambda: 1 // 0, "ZeroDivisionError"), (threading.Lock, "pickle"), (Unreadable, "unpickled on rank")],
)
def test_a_reduction_that_raises_or_whose_result_cannot_travel(talk: Talk, compute, words: str) -> None:
    if talk.size > 1 or compute not in (threading.Lock, Unreadable):  # alone nothing travels
        call = functools.partial(helpers.reduce_and_broadcast, lambda: 0, lambda values: compute(), talk.group)
        expect_failure(talk.ranks[0], words, call)
        works(talk)


def test_a_value_that_only_one_rank_cannot_read(talk: Talk) -> None:
    """A class that is not there, say. It is said whose value and which rank."""
    if talk.size == 1:
        return
    source, reader = talk.ranks[0], talk.ranks[-1]
    value = Unreadable(*talk.ranks[:-1])
    for call in (
        lambda: helpers.compute_and_broadcast(lambda: value, source, talk.group),
        lambda: helpers.broadcast_object_list([value], source, talk.group),
        lambda: helpers.all_gather_object(value if talk.rank == source else None, talk.group),
    ):
        error = expect_failure(source, f"cannot be unpickled on rank {reader}: ModuleNotFoundError: not here", call)
        assert "in read_on" in error.traceback
        works(talk)


def test_wrong_world_size_on_all_ranks_and_on_each_in_turn(talk: Talk) -> None:
    for size in (talk.size + 1, 0, -1):
        with pytest.raises(ValueError, match=f"world_size is {size}, but the group has {talk.size} rank"):
            helpers.gather_from_all_ranks(lambda: 1, world_size=size, group=talk.group)
        works(talk)
    for failing in talk.ranks:
        wrong = talk.rank == failing
        with pytest.raises(ValueError if wrong else RankFailedError, match=f"rank {failing}|world_size is 99"):
            helpers.gather_from_all_ranks(lambda: 1, world_size=99 if wrong else None, group=talk.group)
        works(talk)


def test_ranks_that_are_not_in_the_group(talk: Talk) -> None:
    for call in (
        lambda: helpers.compute_and_broadcast(lambda: 1, rank=99, group=talk.group),
        lambda: helpers.gather_from_all_ranks(lambda: 1, rank=99, group=talk.group),
        lambda: helpers.broadcast_object_list([1], src=99, group=talk.group),
    ):
        with pytest.raises(ValueError, match="rank 99 is not in the group"):
            call()
        works(talk)


def test_lists_of_different_lengths(talk: Talk) -> None:
    root = talk.ranks[0]
    objects = [1] if talk.rank == root else [None, None]
    if talk.rank == root:
        helpers.broadcast_object_list(objects, src=root, group=talk.group)
    else:
        with pytest.raises(ValueError, match=f"the list of rank {root} has length 1, that of rank {talk.rank} 2"):
            helpers.broadcast_object_list(objects, src=root, group=talk.group)
    works(talk)


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RudeError])
def test_what_ends_the_program_is_raised_itself_and_heard_elsewhere(talk: Talk, kind) -> None:
    """As is an exception whose text fails."""

    def fn():
        if talk.rank == talk.ranks[-1]:
            raise kind(3)

    if talk.size == 1:
        return  # nobody hears it
    own = kind if kind is not RudeError else RankFailedError
    with pytest.raises(own if talk.rank == talk.ranks[-1] else RankFailedError):
        helpers.gather_from_all_ranks(fn, group=talk.group)
    works(talk)
