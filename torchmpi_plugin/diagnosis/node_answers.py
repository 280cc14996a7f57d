"""Answers to ``mpiplus status`` for ranks on other nodes: one rank of each node asks the others on their sockets.

So a rank answers that holds Python's lock too, as it does on the node of who asks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import Store

from ..node import node
from ..status import calls
from ..status.files import RankSocket, all_sockets
from . import flight_recorder, last_operations, questions
from .questions import Answers

#: For stacks; faulthandler has them at once, unless a rank is stopped.
_STACKS_SECONDS = 2.5


def written_trace() -> str:
    """Write the trace of this rank's flight recorder; say where, or why not."""
    try:
        return flight_recorder.current.write() if flight_recorder.current is not None else "no recorder"
    except Exception as error:
        return f"mpiplus: the trace cannot be written: {error}"


def _message(pid: int, text: str = "", problem: str = "") -> str:
    return json.dumps({"pid": pid, "text": text, "problem": problem})


def _neighbours(ranks: Sequence[int]) -> list[RankSocket]:
    """The sockets of this job's ranks on this node, this one's among them, of ``ranks``."""
    try:
        sockets = all_sockets()
    except PermissionError:
        return []
    jobs = {each.job for each in sockets if each.pid == os.getpid()}
    return [each for each in sockets if each.job in jobs and each.rank in ranks]


class NodeAnswers:
    """The answers of this node's ranks.

    Args:
        store: a connection that nobody else uses for long.
        rank, size, node: this process in the world, and its node there.
    """

    def __init__(self, store: Store, rank: int, size: int, node: int) -> None:
        self._store = store
        self._rank, self._size, self._node = rank, size, node

    def kinds(self) -> dict[str, Answers]:
        """Return what answers each kind of question."""
        return {
            "status": lambda number, ranks: self._of_node("status", calls.MEMORY_SECONDS, number, ranks),
            "stacks": lambda number, ranks: self._of_node("stacks", _STACKS_SECONDS, number, ranks),
            "dump": lambda _, ranks: self._own(written_trace, ranks),
            "timeline": lambda _, ranks: self._own(self.last_operations, ranks),
        }

    def last_operations(self) -> str:
        """Those of this rank."""
        return last_operations.as_text(self._rank, self._size, self._node)

    def _of_node(self, request: str, seconds: float, number: int, ranks: Sequence[int]) -> Mapping[int, str]:
        if not questions.is_first(self._store, request, number, node.identity()):
            return {}
        sockets = _neighbours(ranks)
        answers = calls.ask(sockets, request, seconds)
        return {
            each.rank: _message(each.pid, answers[each.rank], calls.state_of(each.pid))
            if each.rank in answers
            else _message(each.pid, problem=calls.why_silent(each))
            for each in sockets
        }

    def _own(self, told: Callable[[], str], ranks: Sequence[int]) -> Mapping[int, str]:
        """Of this rank only: it takes each rank's Python anyway."""
        return {self._rank: _message(os.getpid(), told())} if self._rank in ranks else {}
