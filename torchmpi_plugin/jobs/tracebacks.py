"""Tracebacks that are shown in another way than they were written, or not at all.

One that several ranks write, as most mistakes have them do, is shown once, with who has written it too; after Ctrl-C
those of the KeyboardInterrupt are not shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from ..names import describe_ranks
from .stderr_tail import CHAINED, TRACEBACK

_BEGINS = TRACEBACK.encode()
#: What stands between two tracebacks of a chain, and what mpiplus says below the last.
_BETWEEN, _BELOW = tuple(words.encode() for words in CHAINED), b"ends the job: an uncaught exception"
_KIND = b"KeyboardInterrupt"
#: What mpiplus and MPICH say of a rank that leaves by an exception.
_CONSEQUENCES = (
    *(_BELOW, b"application called MPI_Abort"),
    *(b"PMIU_write error", b"system msg for write_line failure"),
)
_MOST_BYTES, _MOST_KNOWN = 1 << 18, 100  # of what one rank has held back, and of tracebacks to compare with


@dataclass
class _Rank:
    held: bytes = b""  # a traceback of which the last line is to come, and what stood between it and the one before
    is_inside: bool = False  # a traceback
    is_old: bool = False  # what is held
    before: bytes = b""  # of a chain that may go on, what was written of it
    is_left_out: bool = False  # its last traceback


class Tracebacks:
    """Takes the ranks' lines, and holds those of a traceback until its last one tells whether it is a new one.

    Nothing is held for long, since its rank may go on: see :meth:`released`.
    """

    def __init__(self) -> None:
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._firsts: dict[bytes, int] = {}  # who was the first, by what they wrote
        self._others: dict[int, list[int]] = {}  # by the first: who is yet to be named

    def without_the_known(self, rank: int, data: bytes) -> bytes:
        """Return what is to be shown now of the data, and of what was held."""
        return b"".join(self._next(rank, self._ranks[rank], line) for line in data.splitlines(keepends=True))

    def _next(self, rank: int, of: _Rank, line: bytes) -> bytes:
        if line.startswith(_BEGINS):
            shown = self._end(of) if of.is_inside else b""  # that one was cut off
            of.is_inside, of.is_old = True, False
        elif of.is_inside:
            shown = b""
        elif of.before and (not line.strip() or line.startswith(_BETWEEN)):
            of.is_old = of.is_old and bool(of.held)
            of.held += line
            return b""
        else:
            return self._end(of, b"" if of.is_left_out and _BELOW in line else line)
        of.held += line
        if len(of.held) > _MOST_BYTES:
            return shown + self._end(of)
        return shown if line[:1].isspace() or line.startswith(_BEGINS) else shown + self._known(rank, of)

    @staticmethod
    def _end(of: _Rank, line: bytes = b"") -> bytes:
        """Return what was held, with the line after it: no traceback goes on here."""
        shown, of.held, of.before = of.held + line, b"", b""
        of.is_inside = of.is_left_out = False
        return shown

    def _known(self, rank: int, of: _Rank) -> bytes:
        before = of.before + re.sub(rb"\brank %d\b" % rank, b"rank", of.held)
        while len(self._firsts) > _MOST_KNOWN:
            del self._firsts[next(iter(self._firsts))]
        first = self._firsts.setdefault(before, rank)
        shown = self._end(of)
        of.before, of.is_left_out = before, first != rank
        if of.is_left_out:
            self._others.setdefault(first, []).append(rank)
        return b"" if of.is_left_out else shown

    def others(self) -> str:
        """Return who has written what a rank wrote before, since the last time; a line for each, or nothing."""
        others, self._others = self._others, {}
        return "".join(
            f"mpiplus run: {describe_ranks(sorted({*ranks}))}: the same error as rank {first}'s above\n"
            for first, ranks in others.items()
        )

    def released(self, at_once: bool) -> dict[int, bytes]:
        """Return what was held already when this was called before, or all, to be shown now, by the rank."""
        old = {rank: self._end(of) for rank, of in self._ranks.items() if of.held and (of.is_old or at_once)}
        for of in self._ranks.values():
            of.is_old = True
        return old

    @property
    def holding(self) -> bool:
        return any(of.held for of in self._ranks.values())


class Interrupted:
    """Takes lines of a rank after Ctrl-C, and keeps those of a traceback until it is known whose it is."""

    def __init__(self) -> None:
        self._held = b""
        self._is_traceback = False

    def without_traceback(self, data: bytes) -> bytes:
        """Return what is to be shown now of the data, and of what was kept."""
        return b"".join(self._next(line) for line in data.splitlines(keepends=True))

    def _next(self, line: bytes) -> bytes:
        if _BEGINS in line:
            shown, self._held, self._is_traceback = self._held if self._is_traceback else b"", line, True
            return shown
        if not self._is_traceback:
            return b"" if line.strip() == b":" or any(words in line for words in _CONSEQUENCES) else line
        self._held += line
        if line[:1].isspace() or not line.strip():
            return b""
        shown, self._held, self._is_traceback = self._held, b"", False
        return b"" if line.startswith(_KIND) else shown

    def rest(self) -> bytes:
        """Return what is left at the end: a traceback that was cut off."""
        shown, self._held = self._held, b""
        return shown
