"""Signals for those processes of a program that have made provision for them: they would end the others."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ..node import node

_LOOKS, _BETWEEN_LOOKS = 5, 0.02


def pass_on(group: int, number: int) -> bool:
    """Send a signal to the processes of a group that catch, ignore or block it; whether there are any."""
    prepared = [process for process in node.members_of(group, os.getpgid) if _is_prepared(process, number)]
    for process in prepared:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return bool(prepared)


def _is_prepared(process: int, number: int) -> bool:
    """As its masks say. While it starts a program a shell blocks all signals, so blocking counts if it lasts."""
    for _ in range(_LOOKS):
        masks = _masks(process)
        if any(masks.get(name, 0) >> (number - 1) & 1 for name in ("SigIgn", "SigCgt")):
            return True
        if not masks.get("SigBlk", 0) >> (number - 1) & 1:
            return False
        time.sleep(_BETWEEN_LOOKS)
    return True


def _masks(process: int) -> dict[str, int]:
    """Its sets of signals by their names in /proc; none: it has ended."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return {name: int(mask, 16) for name, _, mask in lines if name.startswith("Sig") and name != "SigQ"}
    return {}
