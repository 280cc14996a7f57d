"""The nodes that a job may run on, and those of them that have been lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .outcome import Ending, RankRecord


class NotEnoughError(Exception):
    """Fewer nodes are left than the job needs."""


class SpareNodes:
    """Chooses nodes for each attempt."""

    def __init__(self, names: Sequence[str], ranks: int, least: int, most: int, answers: Callable[[str], bool]) -> None:
        self._names, self._ranks, self._least, self._most = list(names), ranks, least, most
        self._answers = answers
        self._chosen: list[str] = []

    def choose(self) -> list[str]:
        """The nodes of the next attempt.

        Raises:
            NotEnoughError: there are too few.
        """
        if len(self._names) < self._least:
            left = ", ".join(self._names) or "none"
            raise NotEnoughError(
                f"the job needs {self._least} node(s) (--nnodes), and there are {len(self._names)}: {left}"
            )
        self._chosen = self._names[: self._most]
        return self._chosen

    def as_option(self, nodes: Sequence[str]) -> str:
        """As ``--hosts`` has them."""
        return ",".join(f"{name}:{self._ranks}" for name in nodes)

    def leave_out_lost(self, ending: Ending) -> list[str]:
        """Those of the last attempt on which no rank could be reached, and which still do not answer."""
        by_node: dict[str, list[RankRecord]] = {name: [] for name in self._chosen}
        for record in ending.records:
            by_node[self._node_of(record)].append(record)
        suspects = [name for name, records in by_node.items() if all(_is_lost(record) for record in records)]
        lost = [name for name in suspects if not self._answers(name)]
        self._names = [name for name in self._names if name not in lost]
        return lost

    def _node_of(self, record: RankRecord) -> str:
        """By the name that it gave, else by its place: the user may have named nodes in another way, or by address."""
        for name in self._chosen:
            if record.node and name.partition(".")[0] == record.node.partition(".")[0]:
                return name
        return self._chosen[min(record.rank // self._ranks, len(self._chosen) - 1)]


def _is_lost(record: RankRecord) -> bool:
    return record.gone_without_a_word or (record.silent and not record.is_killed) or not record.node
