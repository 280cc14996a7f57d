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


def prepare(wanted: str) -> Path:
    """Return one rank's file for the program; none wanted: it is in memory, and leaves nothing behind."""
    if not wanted:
        return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('mpiplus-error')}")
    path = Path(wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an earlier job's
    return path


def message(path: Path) -> str:
    """Return what the program has written, as one line or few; empty: nothing, or nothing that is understood."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with path.open("rb") as file:
            written = json.loads(file.read(_LARGEST))["message"]
        return str(written["message"] if isinstance(written, dict) else written)[:_LONGEST]
    return ""
