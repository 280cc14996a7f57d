"""Time for pending operations to complete at an end: the program's, a group's or a window's."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Set from ``MPIPLUS_EXIT_GRACE`` when a world is made.
seconds = 0.0


def wait_until(true: Callable[[], bool]) -> None:
    """Wait, within the grace."""
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.001)
