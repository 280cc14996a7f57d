"""Signals that are passed on: how a loop gets them for a while, and which processes of a program get them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..node import node

if TYPE_CHECKING:
    import asyncio

#: What a launcher, a guard and a supervisor pass on to the program.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
#: Of those: what ends the job.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: And what programs get for their own purposes, and what ends those that have made no provision.
HARMFUL = (signal.SIGUSR1, signal.SIGUSR2)
_LOOKS, _BETWEEN_LOOKS = 5, 0.02


@contextlib.contextmanager
def caught(loop: asyncio.AbstractEventLoop, handle: Callable[[int], None]) -> Iterator[None]:
    """Have a loop handle those of FORWARDED, where this is the main thread; elsewhere nobody can catch any.

    What was there before is there again afterwards: asyncio alone would restore Python's defaults.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in FORWARDED}
    wakeup = signal.set_wakeup_fd(-1)
    for number in FORWARDED:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup)


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
