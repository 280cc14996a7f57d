"""Python objects between all ranks, by pickle."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from . import members as groups
from . import payloads
from .computing import share
from .failures import Attempt, raise_failed
from .reading import read

T = TypeVar("T")


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
    members, _ = groups.find_or_alone(group, "all_gather_object")
    if members is None:
        return [obj]
    attempt = Attempt.of(lambda: obj)
    messages = dict(zip(members.ranks, payloads.gather(attempt.message, members), strict=True))
    raise_failed("all_gather_object", messages, attempt.error)
    return list(read("all_gather_object", messages, members.ranks, members).values())


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
    members, me = groups.find_or_alone(group, "broadcast_object_list")
    if members is None:
        groups.find_root(src, [me])
        return
    root = members.root(src)
    objects = share("broadcast_object_list", lambda: list(object_list), root, members)
    if len(objects) != len(object_list):
        raise ValueError(
            f"broadcast_object_list: rank {root} sends {len(objects)} objects, the list of rank {members.rank} has "
            f"{len(object_list)}"
        )
    object_list[:] = objects
