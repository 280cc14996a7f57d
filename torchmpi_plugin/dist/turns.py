"""Blocks that the main rank runs first, or alone."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from . import members as groups
from .failures import Failure, raise_failures
from .queries import is_main_process, place
from .store_barrier import StoreBarrier

P = ParamSpec("P")
T = TypeVar("T")

#: How many blocks this rank is in that it runs first, and the barriers of those that have ended inside another:
#: the others come to them only once they have been let into the outer one.
_depth = 0
_ended: list[StoreBarrier] = []


@contextlib.contextmanager
def _in_turn(turn: StoreBarrier | None, rank: int, first: bool, doing: str) -> Iterator[None]:
    global _depth  # noqa: PLW0603
    if first:
        _depth += 1
        try:
            yield
        except BaseException as error:
            _ended.clear()
            failure = Failure.of(error)
            if turn is not None:
                with contextlib.suppress(RuntimeError):  # a store that is gone must not hide the error
                    turn.fail(json.dumps([rank, *failure]))
            raise_failures(doing, {rank: failure}, error)
        finally:
            _depth -= 1
        if turn is not None:
            turn.arrive()
            turn.leave()
            _ended.append(turn)
        while _ended and not _depth:
            _ended.pop().see_off()
        return
    if turn is not None:
        turn.arrive()
        if news := turn.wait(doing):
            rank, *failure = json.loads(news)
            raise_failures(doing, {rank: Failure(*failure)}, None)
    yield


@contextlib.contextmanager
def zero_first(is_main: bool, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block that the main rank runs first, and the others when it is through.

    The wait has no deadline, by design, and sleeps. Rank 0, whose process holds the store, leaves the block when
    all have come to it. From Axolotl, which waits in a barrier of the backend: to the group's deadline (30 minutes
    as a rule), also where the block has raised on the main rank.

    Args:
        is_main: whether this rank goes first. Several may; the others then wait for all of them.
        group: the ranks that take part; the world if None.

    Raises:
        RankFailedError: the block raised on the main rank; on every rank, the main one included, naming it.
            What the block raises on the other ranks is raised there as it is.

    Example::

        with zero_first(is_main_process()):
            dataset = prepare(cache_directory)  # rank 0 writes the cache, the others read it
    """
    members = groups.find(group, "zero_first")
    turn = StoreBarrier(members, "zero_first") if members.size > 1 else None
    with _in_turn(turn, members.rank, is_main or turn is None, "zero_first"):
        yield


@contextlib.contextmanager
def run_local_rank_zero_first(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """:func:`zero_first` inside each node: its first rank goes first, whatever other nodes do.

    From Composer, where a node waits for all others too, to the group's deadline.

    Args:
        group: the ranks that take part; the world if None.

    Raises:
        RankFailedError: the block raised on this node's first rank; on every rank of this node.

    Example::

        with run_local_rank_zero_first():
            dataset = CIFAR10("/local/scratch", download=True)
    """
    doing = "run_local_rank_zero_first"
    members = groups.find(group, doing)
    turn, first = None, True
    if members.size > 1:
        here = place(members.group)
        turn, first = StoreBarrier(members, f"node/{here.node_rank}", here.local_size), here.local_rank == 0
    with _in_turn(turn, members.rank, first, doing):
        yield


class zero_only:  # noqa: N801 - a function's name, like the original's
    """A block that only the main rank executes: ``with zero_only() as main:`` or ``@zero_only()``.

    Python cannot skip the body of a with statement, so the block runs everywhere and is told whether this is
    the main rank; Axolotl's ran everywhere without a word. As a decorator the function is called on the main
    rank only, and gives None elsewhere. Nobody waits for anybody.

    Args:
        group: whose rank 0 is the main one; the world's if None.

    Raises:
        TypeError: ``@zero_only`` without its parentheses.

    Example::

        with zero_only() as main:
            if main:
                print(table)

        @zero_only()
        def save(path): torch.save(model.state_dict(), path)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if callable(group):
            raise TypeError("zero_only takes a group; to decorate a function write @zero_only()")
        self._group = group

    def __enter__(self) -> bool:
        return is_main_process(group=self._group)

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def on_main(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if is_main_process(group=self._group) else None

        return on_main
