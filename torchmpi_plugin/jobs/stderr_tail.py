"""The end of what a rank has written to stderr: its last lines, or all of its last traceback."""

from __future__ import annotations

import re

TRACEBACK = "Traceback (most recent call last)"
_LINES = 40
_TRACEBACK_LINES, _FIRST_LINES = 400, 100  # of a longer one the middle is left out
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')
#: In the names of files that are not the user's.
_OTHERS = ("/site-packages/", "/torchmpi_plugin/", "<frozen ", "/lib/python3")
_LONGEST = 400


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
