"""The outcome of a piece of work on one rank, in a form that travels: errors go the way of values."""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import RankFailedError
from ..names import describe_ranks
from .members import Members

T = TypeVar("T")

_LONGEST_TRACEBACK = 16_000
_SHOWN = 4
_SIMPLE = {type(None), bool, int, float, complex, str, bytes}
#: Bytes of a value that all ranks are told rather than only the one that wants it.
_SHORT = 1024


class Failure(NamedTuple):
    """An exception as other ranks see it."""

    summary: str
    traceback: str
    node: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception; never raises."""
        try:
            summary = "".join(traceback.format_exception_only(error)).strip()
            text = "".join(traceback.format_exception(error))
        except Exception:  # an exception whose own __str__ fails
            summary = text = type(error).__name__
        return cls(summary, text[-_LONGEST_TRACEBACK:], socket.gethostname())


class Message(NamedTuple):
    """The message of one rank."""

    failure: Failure | None  # what has gone wrong there
    value: bytes | None = None  # pickled; None where the rank that wants it is told apart
    simple: bool = False  # the value is a number or a text, and can be unpickled anywhere


class Attempt(NamedTuple):
    """The value of a function, or its exception; and either as a message."""

    value: Any
    error: BaseException | None
    message: Message

    @classmethod
    def failed(cls, error: BaseException) -> Attempt:
        return cls(None, error, Message(Failure.of(error)))

    @classmethod
    def of(cls, function: Callable[[], Any], members: Members) -> Attempt:
        """Call ``function``. A value that cannot be pickled is a failure too, where there are others."""
        try:
            value = function()
            pickled = pickle.dumps(value) if members.size > 1 else b""
            return cls(value, None, Message(None, pickled, type(value) in _SIMPLE))
        # SystemExit and Ctrl-C too: the other ranks wait in a collective, and must hear of it.
        except BaseException as error:
            return cls.failed(error)


def tell_all(thing: T, members: Members) -> list[T]:
    """Tell all ranks something that pickle takes; return what each of them tells, in the group's order."""
    everybody: list[Any] = [thing] * members.size
    if members.size > 1:
        dist.all_gather_object(everybody, thing, members.group)
    return everybody


def gather(message: Message, members: Members, root: int | None = None) -> list[Message]:
    """The messages of all ranks, in the group's order; the longer values for ``root`` alone, or for all if None."""
    is_told = root is None or len(message.value or b"") <= _SHORT
    told = tell_all(message if is_told else message._replace(value=None), members)
    if any(each.failure for each in told) or all(each.value is not None for each in told):
        return told
    values: list[Any] | None = [None] * members.size if members.rank == root else None
    dist.gather_object(message.value, values, root, members.group)
    return told if values is None else [each._replace(value=value) for each, value in zip(told, values, strict=True)]


def broadcast(message: Message | None, root: int, members: Members) -> Message:
    """The message of ``root``, which gives it; the others give None."""
    found: list[Any] = [message]
    if members.size > 1:
        dist.broadcast_object_list(found, root, members.group)
    return found[0]


def raise_failures(doing: str, failures: Mapping[int, Failure], own: BaseException | None) -> None:
    """Raise what happened on some ranks, by global rank, on this and every other rank; return if nothing did.

    This rank's ``own`` exception becomes the cause. One that ends the program (SystemExit, KeyboardInterrupt) is raised
    itself.
    """
    if not failures:
        return
    if own is not None and not isinstance(own, Exception):
        raise own
    ranks = sorted(failures)
    first = failures[ranks[0]]
    told = "; ".join(f"rank {rank}: {failures[rank].summary}" for rank in ranks[:_SHOWN])
    text = f"{doing}: {describe_ranks(ranks)} failed: {first.summary if len(ranks) == 1 else told}"
    raise RankFailedError(text, ranks=ranks, node=first.node, traceback=first.traceback) from own
