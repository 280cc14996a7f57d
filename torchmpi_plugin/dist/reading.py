"""Unpickling what has arrived: on all ranks, or an error on all of them.

A value may be pickled on one rank and fail where it is unpickled: an exception with arguments of its own, a class
that only some ranks have.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from typing import Any

from . import payloads
from .failures import Failure, raise_failures
from .members import Members


def read(
    doing: str, messages: Mapping[int, payloads.Message], wanted: Collection[int], members: Members
) -> dict[int, Any]:
    """Unpickle some of the messages, and return when every rank could. Simple ones need no such agreement.

    Args:
        doing: the helper's name.
        messages: of the same ranks everywhere, by their global ranks; all of them ok.
        wanted: whose messages this rank unpickles; their payloads are here.
        members: the group, all of whose ranks make the call.

    Returns:
        The values by rank.

    Raises:
        RankFailedError: a rank's message cannot be unpickled on some rank; on every rank, naming whose it is.
    """
    values, failures, own = {}, {}, None
    for rank in wanted:
        try:
            values[rank] = pickle.loads(messages[rank].payload)
        except BaseException as error:
            failure = Failure.of(error)
            text = f"its value cannot be unpickled on rank {members.rank}: {failure.summary}"
            failures[rank], own = failure._replace(summary=text), error
    if not all(message.simple for message in messages.values()):
        for answer in payloads.gather(payloads.Message(True, pickle.dumps(failures)), members):
            failures.update(pickle.loads(answer.payload))
    raise_failures(doing, failures, own)
    return values
