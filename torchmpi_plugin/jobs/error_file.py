"""The file into which a program under torch's ``@record`` writes the exception that it ends with."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

#: Where torch looks for the file's name.
VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LARGEST = 1 << 20
_LONGEST = 2000  # of the message; its traceback is on stderr too


class ErrorFile:
    """One rank's.

    Args:
        path: where it stays when the rank has ended; None: it is in memory, and leaves nothing behind.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None:
            path = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('mpiplus-error')}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # an earlier job's
        self._path = path

    def variable(self) -> dict[str, str]:
        """For the program's environment."""
        return {VARIABLE: str(self._path)}

    def message(self) -> str:
        """Return what the program has written, as one line or few; empty: nothing, or nothing that is understood."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with self._path.open("rb") as file:
                written = json.loads(file.read(_LARGEST))
            message = written["message"]
            return str(message["message"] if isinstance(message, dict) else message)[:_LONGEST]
        return ""
