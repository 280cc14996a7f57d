"""Signals that are passed on, and how a loop gets them for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

#: What a launcher, a guard and a supervisor pass on to the program.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
#: Of those: what ends the job.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: And what programs get for their own purposes, and what ends those that have made no provision.
HARMFUL = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def caught(
    numbers: Sequence[signal.Signals], loop: asyncio.AbstractEventLoop, handle: Callable[[int], None]
) -> Iterator[None]:
    """Have a loop handle signals, where this is the main thread; elsewhere nobody can catch any.

    What was there before is there again afterwards: asyncio alone would restore Python's defaults.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    wakeup = signal.set_wakeup_fd(-1)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup)
