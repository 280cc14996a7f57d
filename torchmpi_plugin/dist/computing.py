"""Functions that run on one rank or on all, and whose results travel exactly.

Values are pickled: 2**53+1 stays an int, 0.1 keeps its bits, a bool stays one. Exceptions travel like values:
every rank raises, naming the rank that failed, and the group can be used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from . import members as groups
from . import payloads
from .failures import Attempt, Failure, raise_failed, raise_failures
from .reading import read

T = TypeVar("T")


def _alone(doing: str, rank: int, function: Callable[[], T]) -> T:
    attempt = Attempt.of(function, travels=False)
    if attempt.error is not None:
        raise_failures(doing, {rank: Failure.of(attempt.error)}, attempt.error)
    result: T = attempt.value
    return result


def share(doing: str, function: Callable[[], Any], root: int, members: groups.Members) -> Any:
    """Call a function on one rank; its result on all, on that rank the very object."""
    attempt = Attempt.of(function) if members.rank == root else None
    message = payloads.broadcast(attempt and attempt.message, root, members)
    raise_failed(doing, {root: message}, attempt and attempt.error)
    values = read(doing, {root: message}, [] if attempt is not None else [root], members)
    return attempt.value if attempt is not None else values[root]


def compute_and_broadcast(fn: Callable[[], T], rank: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Call ``fn`` on one rank, and return its result on all.

    From Axolotl, which sends the result as a float32 and hangs where ``fn`` raises.

    Args:
        fn: called on ``rank`` only; its result may be anything that pickle takes.
        rank: a global rank; the default 0 means the group's first rank where 0 is not in it.
        group: the ranks that take part, all of which must make the call; the world if None.

    Returns:
        On ``rank`` the very object, elsewhere a copy.

    Raises:
        RankFailedError: ``fn`` raised, or its result cannot be pickled or unpickled; on every rank, with
            ``rank``, ``node`` and ``traceback`` of what failed.
        ValueError: ``rank`` is not in the group.

    Example::

        steps = compute_and_broadcast(lambda: count_tokens(dataset) // batch_size)
    """
    doing = "compute_and_broadcast"
    members, me = groups.find_or_alone(group, doing)
    if members is None:
        groups.find_root(rank, [me])
        return _alone(doing, me, fn)
    result: T = share(doing, fn, members.root(rank), members)
    return result


def _check_size(world_size: int | None, size: int) -> None:
    if world_size not in (None, 1, size):
        raise ValueError(
            f"world_size is {world_size}, but the group has {size} rank{'s' if size > 1 else ''}; leave it out"
        )


def _gather(doing: str, attempt: Attempt, root: int, members: groups.Members) -> list[Any] | None:
    messages = dict(zip(members.ranks, payloads.gather(attempt.message, members, root), strict=True))
    raise_failed(doing, messages, attempt.error)
    others = [rank for rank in members.ranks if rank != root] if members.rank == root else []
    values = {**read(doing, messages, others, members), root: attempt.value}
    return [values[rank] for rank in members.ranks] if members.rank == root else None


def gather_from_all_ranks(
    fn: Callable[[], T], world_size: int | None = None, rank: int = 0, group: dist.ProcessGroup | None = None
) -> list[T] | None:
    """Call ``fn`` on every rank, and return the list of results on one.

    From Axolotl, which sends each result as a float32, gives wrong lists for a wrong ``world_size``, and hangs
    where ``fn`` raises on one rank.

    Args:
        fn: called on every rank; its result may be anything that pickle takes.
        world_size: not needed. None, 1 (Axolotl's default) or the size of the group.
        rank: the global rank that gets the list; the default 0 means the group's first rank where 0 is not
            in it.
        group: the ranks that take part; the world if None.

    Returns:
        On ``rank`` the results in the group's order, elsewhere None.

    Raises:
        RankFailedError: ``fn`` raised on some rank, or its result cannot be pickled or unpickled; on every
            rank, naming that one.
        ValueError: another ``world_size``, or a ``rank`` that is not in the group.

    Example::

        lengths = gather_from_all_ranks(lambda: len(shard))
        if is_main_process(): print(sum(lengths))
    """
    doing = "gather_from_all_ranks"
    members, me = groups.find_or_alone(group, doing)
    if members is None:
        _check_size(world_size, 1)
        groups.find_root(rank, [me])
        return [_alone(doing, me, fn)]
    try:
        _check_size(world_size, members.size)
        root = members.root(rank)
    except ValueError as error:
        # Ranks whose arguments are right wait for this one.
        payloads.gather(Attempt.failed(error).message, members)
        raise
    return _gather(doing, Attempt.of(fn), root, members)


gather_scalar_from_all_ranks = gather_from_all_ranks


def reduce_and_broadcast(
    fn1: Callable[[], Any], fn2: Callable[[list[Any]], T], group: dist.ProcessGroup | None = None
) -> T:
    """Call ``fn1`` on every rank and ``fn2`` once on the list of results; return what it gives on all.

    From Axolotl, as :func:`gather_from_all_ranks`.

    Args:
        fn1: called on every rank.
        fn2: called on the group's first rank.
        group: the ranks that take part; the world if None.

    Raises:
        RankFailedError: one of the functions raised, or its result cannot be pickled or unpickled; on every
            rank.

    Example::

        slowest = reduce_and_broadcast(lambda: seconds, max)
    """
    doing = "reduce_and_broadcast"
    members, me = groups.find_or_alone(group, doing)
    if members is None:
        return _alone(doing, me, lambda: fn2([fn1()]))
    root = members.ranks[0]
    values = _gather(doing, Attempt.of(fn1), root, members)
    result: T = share(doing, lambda: fn2(values or []), root, members)
    return result
