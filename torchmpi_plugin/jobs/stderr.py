"""Lines that ranks write to stderr: the last ones, and tracebacks that are shown in another way, or not at all.

One that several ranks write, as most mistakes have them do, is shown once, with who has written it too; after Ctrl-C
those of the KeyboardInterrupt are not shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from ..names import describe_ranks

TRACEBACK = "Traceback (most recent call last)"
_LINES = 40
_TRACEBACK_LINES, _FIRST_LINES = 400, 100  # of a longer one the middle is left out
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')
#: In the names of files that are not the user's.
_OTHERS = ("/site-packages/", "/torchmpi_plugin/", "<frozen ", "/lib/python3")
_LONGEST = 400
_BEGINS = TRACEBACK.encode()
#: What stands between two tracebacks of a chain, and what mpiplus says below the last.
_BETWEEN, _BELOW = tuple(words.encode() for words in CHAINED), b"ends the job: an uncaught exception"
#: What mpiplus and MPICH say of a rank that leaves by an exception.
_CONSEQUENCES = _BELOW, b"application called MPI_Abort", b"PMIU_write error", b"system msg for write_line failure"
_MOST_BYTES, _MOST_KNOWN = 1 << 18, 100  # of what one rank has held back, and of tracebacks to compare with


def last_error(text: str) -> tuple[str, str]:
    """Of the last traceback the exception, and in whose line of the user's program it came up; empty: there is none."""
    lines = text.rpartition(TRACEBACK)[2].splitlines()[1:] if TRACEBACK in text else []
    frames = [found.groups() for line in lines if (found := _FRAME.match(line))]
    last = max((at for at, line in enumerate(lines) if _FRAME.match(line)), default=-1)
    error = next((line for line in lines[last + 1 :] if line.strip() and not line[0].isspace()), "")
    own = [frame for frame in frames if not any(part in frame[0] for part in _OTHERS)]
    error = re.sub(r"^[\w.]+\.(?=\w+:)", "", error)
    return error[:_LONGEST], "at {}:{} in {}".format(*own[-1]) if own else ""


class StderrTail:
    """Keeps what may be the rank's last words, while it writes on."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._left_out = 0
        self._is_traceback = False
        self._since = 0  # lines from the traceback's last frame on
        self._before = ""  # the last line with something on it

    def add(self, line: str) -> None:
        if TRACEBACK in line and not line.lstrip().startswith("|"):  # that would be a part of an ExceptionGroup
            if not self._is_traceback or not self._before.startswith(CHAINED):
                self._lines, self._left_out = [], 0
            self._is_traceback, self._since = True, 0
        elif self._is_traceback and (self._since or not line[:1].isspace()):
            self._since += 1
            if self._since > _LINES:  # that trouble is long past
                self._is_traceback, self._left_out = False, 0
                self._lines = self._lines[-_LINES:]
        self._before = line if line.strip() else self._before
        self._lines.append(line)
        if self._is_traceback and len(self._lines) > _TRACEBACK_LINES:
            del self._lines[_FIRST_LINES]
            self._left_out += 1
        elif not self._is_traceback:
            del self._lines[:-_LINES]

    def text(self) -> str:
        """The last lines, from the last traceback on if there is one; a chain of tracebacks from the first on."""
        if not self._left_out:
            return "".join(self._lines)
        gap = f"... {self._left_out} lines left out ...\n"
        return "".join([*self._lines[:_FIRST_LINES], gap, *self._lines[_FIRST_LINES:]])


@dataclass
class _Rank:
    held: bytes = b""  # a traceback of which the last line is to come, and what stood between it and the one before
    is_inside: bool = False  # a traceback
    is_old: bool = False  # what is held
    before: bytes = b""  # of a chain that may go on, what was written of it
    is_left_out: bool = False  # its last traceback


class Tracebacks:
    """Takes the ranks' lines, and holds those of a traceback until its last one tells whether it is a new one.

    Nothing is held for long, since its rank may go on: see :meth:`released`. After Ctrl-C ranks end.

    Args:
        compares: leave out one that another rank has written.

    Attributes:
        interrupted: by Ctrl-C; the tracebacks that come of it are left out, and what is said of them.
    """

    def __init__(self, compares: bool = True) -> None:
        self._compares = compares
        self.interrupted = False
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._firsts: dict[bytes, int] = {}  # who was the first, by what they wrote
        self._others: dict[int, list[int]] = {}  # by the first: who is yet to be named

    def shown(self, rank: int, data: bytes) -> bytes:
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
            return self._end(of, b"" if self._follows(of, line) else line)
        of.held += line
        if len(of.held) > _MOST_BYTES:
            return shown + self._end(of)
        return shown if line[:1].isspace() or line.startswith(_BEGINS) else shown + self._whole(rank, of, line)

    def _follows(self, of: _Rank, line: bytes) -> bool:
        """Return whether a line belongs to a traceback that was left out."""
        if self.interrupted:
            return line.strip() == b":" or any(words in line for words in _CONSEQUENCES)
        return of.is_left_out and _BELOW in line

    @staticmethod
    def _end(of: _Rank, line: bytes = b"") -> bytes:
        """Return what was held, with the line after it: no traceback goes on here."""
        shown, of.held, of.before = of.held + line, b"", b""
        of.is_inside = of.is_left_out = False
        return shown

    def _whole(self, rank: int, of: _Rank, last: bytes) -> bytes:
        """Return a traceback, whose last line has come, if it is to be shown."""
        is_of_ctrl_c = self.interrupted and last.startswith(b"KeyboardInterrupt")
        if is_of_ctrl_c or not self._compares:
            shown = self._end(of)
            return b"" if is_of_ctrl_c else shown
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
        ready = (it for it in self._ranks.items() if at_once or (it[1].is_old and not self.interrupted))
        old = {rank: self._end(of) for rank, of in ready if of.held}
        for of in self._ranks.values():
            of.is_old = True
        return old

    @property
    def holding(self) -> bool:
        return any(of.held for of in self._ranks.values())
