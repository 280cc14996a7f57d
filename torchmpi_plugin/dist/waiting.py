"""Ranks that wait for each other over the group's store, in barriers and for blocks that the main rank runs first.

They are asleep between looks, for hours if need be. A collective would not do: it has the group's deadline, and its
wait may burn a core.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import DistBackendError
from ..names import describe_ranks
from . import members as groups
from .failures import Failure, raise_failures
from .members import Members
from .queries import is_main_process, place

P = ParamSpec("P")
T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 5.0
#: How long a rank that may go on can take to notice, beside its pause: the machine may be busy.
_SCHEDULING = 1.0
#: Looks per second that the store takes from all ranks together, and from each one.
_LOOKS, _LOOKS_EACH = 1000.0, 20.0

#: The key that lets the ranks go on; its value is an error, or nothing.
_OPEN = "door"

_numbers: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()


class StoreBarrier:
    """One wait for each other of all ranks, or of ``size``, all of which make those of one name in the same order.

    Attributes:
        runs_first: it is that of a block which this rank runs first.
        ended: those of the blocks inside that one, which have ended.
    """

    runs_first = False

    def __init__(self, members: Members, name: str, size: int | None = None) -> None:
        self._members, self._numbers = members, dict[str, int]()
        self.ended: list[StoreBarrier] = []
        outer = next((turn for turn in reversed(_inside.get()) if turn._members.group is members.group), None)
        # Numbered anew in each block: after an error not all ranks have come to what is inside.
        numbers = _numbers.setdefault(members.group, {}) if outer is None else outer._numbers
        numbers[name] = numbers.get(name, 0) + 1
        self._path: str = f"{outer._path if outer else 'mpiplus-dist'}/{name}/{numbers[name]}"
        self._store = dist.PrefixStore(self._path, members.group.get_group_store())
        self._size = members.size if size is None else size
        self._longest_pause = min(max(1 / _LOOKS_EACH, members.size / _LOOKS), _LONGEST_PAUSE)

    def arrive(self) -> None:
        """This rank has come; the last one lets all go on."""
        self._store.set(f"came/{self._members.rank}", "")
        if self._store.add("count", 1) == self._size:
            self._store.set(_OPEN, "")

    def fail(self, error: str) -> None:
        """Let all go on, with an error instead; whoever comes later gets it too."""
        self._store.set(_OPEN, error)
        self.leave()
        time.sleep(2 * self._longest_pause)  # for those who wait: this process may end next, and the job with it

    def wait(self, doing: str, seconds: float = float("inf")) -> bytes:
        """Sleep until all have come, and leave; return the error, or nothing. By default it has no deadline.

        Raises:
            DistBackendError: time is up (the message names the missing ranks), or the store is gone.
        """
        start = time.monotonic()
        while not self._has(_OPEN, doing):
            waited = time.monotonic() - start
            if waited >= seconds:
                self._give_up(doing, waited)
            self._pause(waited, seconds - waited)
        error = self._store.get(_OPEN)
        self.leave()
        if not error:
            self.see_off(2 * self._longest_pause + _SCHEDULING)
        return error

    def leave(self) -> None:
        """The last one to leave takes the keys away."""
        if self._store.add("left", 1) == self._size:
            for key in (*(f"came/{rank}" for rank in self._members.ranks), "count", _OPEN, "left"):
                with contextlib.suppress(RuntimeError):
                    self._store.delete_key(key)

    def see_off(self, seconds: float = float("inf")) -> None:
        """On rank 0, sleep until all have left: its process holds the store as a rule, and may end next."""
        start, waited = time.monotonic(), 0.0
        with contextlib.suppress(DistBackendError):
            while self._members.rank == 0 and waited < seconds and self._has("left", ""):
                self._pause(waited, seconds - waited)
                waited = time.monotonic() - start

    def _pause(self, waited: float, left: float) -> None:
        time.sleep(max(_SHORTEST_PAUSE, min(waited / 10, self._longest_pause, left)))

    def _has(self, key: str, doing: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError as error:
            raise DistBackendError(
                f"{doing}: rank {self._members.rank} lost the store while it waited: {str(error).splitlines()[0]}; its "
                f"process, rank 0's as a rule, may have ended"
            ) from error

    def _give_up(self, doing: str, waited: float) -> None:
        """Unless all have come at the last moment: they go on any moment then."""
        missing = [rank for rank in self._members.ranks if not self._store.check([f"came/{rank}"])]
        if not missing:
            return
        self.leave()
        raise DistBackendError(
            f"{doing}: rank {self._members.rank} gave up after {waited:.1f} s: {describe_ranks(missing)} did not come"
        )


def barrier(group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None) -> None:
    """Wait until every rank has come. Does nothing alone. From Composer and Axolotl.

    Args:
        group: the ranks that meet; the world if None.
        timeout: seconds, or a timedelta. The ranks then meet over the group's store, whatever the backend. If
            None it is torch's barrier, with the group's deadline.

    Raises:
        DistBackendError: time is up; the message names the ranks that did not come, by their global ranks.

    Example::

        barrier(timeout=60)
    """
    members = groups.find(group, "barrier")
    if members.size == 1:
        return
    if timeout is None:
        dist.barrier(group=members.group)
        return
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    waiting = StoreBarrier(members, "barrier")
    waiting.arrive()
    waiting.wait("barrier", seconds)


# ---- blocks that the main rank runs first, or alone ----

#: The barriers of the blocks that this thread is in, from the outermost on.
_inside: ContextVar[tuple[StoreBarrier, ...]] = ContextVar("_inside", default=())


@contextlib.contextmanager
def _within(turn: StoreBarrier | None) -> Iterator[None]:
    if turn is not None:
        _inside.set((*_inside.get(), turn))
    try:
        yield
    finally:  # a token would be refused where a generator ends in another context
        _inside.set(tuple(each for each in _inside.get() if each is not turn))


def _see_off(turn: StoreBarrier) -> None:
    """And those of the blocks inside, to which the others come only once they have been let into the outermost one."""
    outer = next((each for each in _inside.get() if each.runs_first), None)
    if outer is not None:
        outer.ended += [turn, *turn.ended]
        return
    for each in (turn, *turn.ended):
        each.see_off()


@contextlib.contextmanager
def _in_turn(turn: StoreBarrier | None, rank: int, first: bool, doing: str) -> Iterator[None]:
    if not first and turn is not None:
        turn.arrive()
        if news := turn.wait(doing):
            rank, *failure = json.loads(news)
            raise_failures(doing, {rank: Failure(*failure)}, None)
        with _within(turn):
            yield
        return
    if turn is not None:
        turn.runs_first = True
    try:
        with _within(turn):
            yield
    except BaseException as error:
        failure = Failure.of(error)
        if turn is not None:
            with contextlib.suppress(RuntimeError):  # a store that is gone must not hide the error
                turn.fail(json.dumps([rank, *failure]))
        raise_failures(doing, {rank: failure}, error)
    if turn is not None:
        turn.arrive()
        turn.leave()
        _see_off(turn)


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
