"""The outcome of a piece of work on one rank, in a form that travels: errors go the way of values."""

from __future__ import annotations

import json
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import RankFailedError
from ..names import describe_ranks
from .payloads import Message

_LONGEST_TRACEBACK = 16_000
_SHOWN = 4
_SIMPLE = {type(None), bool, int, float, complex, str, bytes}


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

    def dumps(self) -> str:
        """As text, for :meth:`loads`."""
        return json.dumps(self)

    @classmethod
    def loads(cls, data: str | bytes) -> Failure:
        """The inverse of :meth:`dumps`."""
        return cls(*json.loads(data))


class Attempt(NamedTuple):
    """The value of a function, or its exception; and either as a message."""

    value: Any
    error: BaseException | None
    message: Message

    @classmethod
    def failed(cls, error: BaseException) -> Attempt:
        """Turn an exception into an outcome."""
        return cls(None, error, Message(False, Failure.of(error).dumps().encode()))

    @classmethod
    def of(cls, function: Callable[[], Any], travels: bool = True) -> Attempt:
        """Call ``function``. A value that ``travels`` and cannot be pickled is a failure too."""
        try:
            value = function()
            return cls(value, None, Message(True, pickle.dumps(value) if travels else b"", type(value) in _SIMPLE))
        # SystemExit and Ctrl-C too: the other ranks wait in a collective, and must hear of it.
        except BaseException as error:
            return cls.failed(error)


def raise_failures(doing: str, failures: Mapping[int, Failure], own: BaseException | None) -> None:
    """Raise what happened on some ranks, on this and every other rank; return if nothing did.

    Args:
        doing: the helper's name.
        failures: by global rank.
        own: this rank's own exception, which becomes the cause. One that ends the program (SystemExit,
            KeyboardInterrupt) is raised itself.

    Raises:
        RankFailedError: there are failures.
    """
    if not failures:
        return
    if own is not None and not isinstance(own, Exception):
        raise own
    ranks = sorted(failures)
    first = failures[ranks[0]]
    told = "; ".join(f"rank {rank}: {failures[rank].summary}" for rank in ranks[:_SHOWN])
    if len(ranks) == 1:
        text = f"{doing}: rank {ranks[0]} failed: {first.summary}"
    else:
        text = f"{doing}: {describe_ranks(ranks)} failed: {told}"
    raise RankFailedError(text, ranks=ranks, node=first.node, traceback=first.traceback) from own


def raise_failed(doing: str, messages: Mapping[int, Message], own: BaseException | None) -> None:
    """As :func:`raise_failures`, of the messages that are not ok."""
    raise_failures(doing, {r: Failure.loads(m.payload) for r, m in messages.items() if not m.ok}, own)
