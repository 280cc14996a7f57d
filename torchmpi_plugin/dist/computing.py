"""Python objects, and functions that run on one rank or on all, whose results travel exactly.

Values are pickled: 2**53+1 stays an int, 0.1 keeps its bits, a bool stays one. Exceptions travel like values:
every rank raises, naming the rank that failed, and the group can be used afterwards. A value may be pickled on one rank
and fail where it is unpickled: an exception with arguments of its own, a class that only some ranks have. Then too all
raise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ..names import counted
from . import members as groups
from .failures import Attempt, Failure, Message, broadcast, gather, raise_failures, tell_all

T = TypeVar("T")


def _read(
    doing: str,
    messages: Mapping[int, Message],
    own: BaseException | None,
    wanted: Collection[int],
    members: groups.Members,
) -> dict[int, Any]:
    """Unpickle the ``wanted`` messages, and return when every rank could. Simple ones need no such agreement.

    Args:
        messages: of the same ranks everywhere, by their global ranks.
        own: this rank's exception, if its message tells of one.

    Raises:
        RankFailedError: a message is a failure, or cannot be unpickled on some rank; on every rank, naming whose it is.
    """
    raise_failures(doing, {rank: message.failure for rank, message in messages.items() if message.failure}, own)
    values, failures = {}, {}
    for rank in wanted:
        try:
            values[rank] = pickle.loads(messages[rank].value or b"")
        except BaseException as error:
            failure = Failure.of(error)
            text = f"its value cannot be unpickled on rank {members.rank}: {failure.summary}"
            failures[rank], own = failure._replace(summary=text), error
    if not all(message.simple for message in messages.values()):
        for answer in tell_all(failures, members):
            failures.update(answer)
    raise_failures(doing, failures, own)
    return values


def _share(doing: str, function: Callable[[], T], root: int, members: groups.Members) -> T:
    """Call a function on one rank; its result on all, on that rank the very object."""
    attempt = Attempt.of(function, members) if members.rank == root else None
    message = broadcast(attempt and attempt.message, root, members)
    wanted = [] if attempt is not None else [root]
    values = _read(doing, {root: message}, attempt and attempt.error, wanted, members)
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
    members = groups.find(group, doing)
    return _share(doing, fn, groups.find_root(rank, members.ranks), members)


def _gather(doing: str, attempt: Attempt, root: int, members: groups.Members) -> list[Any] | None:
    messages = dict(zip(members.ranks, gather(attempt.message, members, root), strict=True))
    others = [rank for rank in members.ranks if rank != root] if members.rank == root else []
    values = {**_read(doing, messages, attempt.error, others, members), root: attempt.value}
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
    members = groups.find(group, doing)
    try:
        if world_size not in (None, 1, members.size):
            size = counted(members.size, "rank")
            raise ValueError(f"world_size is {world_size}, but the group has {size}; leave it out")
        root = groups.find_root(rank, members.ranks)
    except ValueError as error:
        # Ranks whose arguments are right wait for this one.
        gather(Attempt.failed(error).message, members)
        raise
    return _gather(doing, Attempt.of(fn, members), root, members)


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
    members = groups.find(group, doing)
    root = members.ranks[0]
    values = _gather(doing, Attempt.of(fn1, members), root, members)
    return _share(doing, lambda: fn2(values or []), root, members)


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's object, on every rank, in the group's order.

    From Composer, whose list has the world's size in any group. Here an object that cannot be pickled raises
    on all ranks.

    Args:
        obj: anything that pickle takes.
        group: the ranks that take part; the world if None.

    Returns:
        One object for each rank, all of them copies; ``[obj]`` alone.

    Raises:
        RankFailedError: a rank's object cannot be pickled or unpickled; on every rank, naming that one.

    Example::

        losses = all_gather_object(float(loss))
    """
    members = groups.find(group, "all_gather_object")
    if members.size == 1:
        return [obj]
    attempt = Attempt.of(lambda: obj, members)
    messages = dict(zip(members.ranks, gather(attempt.message, members), strict=True))
    return list(_read("all_gather_object", messages, attempt.error, members.ranks, members).values())


def broadcast_object_list(object_list: list[Any], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Replace the contents of every rank's list by those of ``src``.

    From Composer, which leaves the other ranks waiting where an object cannot be pickled.

    Args:
        object_list: as long on every rank as on ``src``.
        src: a global rank; the default 0 means the group's first rank where 0 is not in it.
        group: the ranks that take part; the world if None.

    Raises:
        RankFailedError: an object cannot be pickled or unpickled; on every rank.
        ValueError: ``src`` is not in the group, or this rank's list has another length.

    Example::

        names = [make_run_name()] if get_global_rank() == 0 else [None]
        broadcast_object_list(names)
    """
    members = groups.find(group, "broadcast_object_list")
    root = groups.find_root(src, members.ranks)
    objects = _share("broadcast_object_list", lambda: list(object_list), root, members)
    if len(objects) != len(object_list):
        raise ValueError(
            f"broadcast_object_list: the list of rank {root} has length {len(objects)}, that of rank {members.rank} "
            f"{len(object_list)}"
        )
    object_list[:] = objects
