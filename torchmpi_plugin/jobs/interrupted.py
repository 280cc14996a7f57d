"""A rank's stderr once Ctrl-C has come, without the traceback of the KeyboardInterrupt."""

from __future__ import annotations

from .stderr_tail import TRACEBACK

_KIND = b"KeyboardInterrupt"
#: What mpiplus and MPICH say of a rank that leaves by an exception.
_CONSEQUENCES = (
    *(b"ends the job: an uncaught exception", b"application called MPI_Abort"),
    *(b"PMIU_write error", b"system msg for write_line failure"),
)


class Interrupted:
    """Takes lines, and keeps those of a traceback until it is known whose it is."""

    def __init__(self) -> None:
        self._held = b""
        self._is_traceback = False

    def without_traceback(self, data: bytes) -> bytes:
        """Return what is to be shown now of the data, and of what was kept."""
        return b"".join(self._next(line) for line in data.splitlines(keepends=True))

    def _next(self, line: bytes) -> bytes:
        if TRACEBACK.encode() in line:
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
