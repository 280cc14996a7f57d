"""Signals for those processes of a program that have made provision for them: they would end the others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def pass_on(group: int, number: int) -> bool:
    """Send a signal to the processes of a group that catch, ignore or block it; whether there are any."""
    prepared = [process for process in _members(group) if _is_prepared(process, number)]
    for process in prepared:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return bool(prepared)


def _members(group: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if name.isdigit() and os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def _is_prepared(process: int, number: int) -> bool:
    """As its masks say."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigBlk", "SigIgn", "SigCgt") and int(mask, 16) >> (number - 1) & 1:
                return True
    return False
