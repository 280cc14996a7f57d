"""A barrier that says who is missing."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from . import members as groups
from .store_barrier import StoreBarrier


def barrier(group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None) -> None:
    """Wait until every rank has come. Does nothing alone. From Composer and Axolotl.

    Args:
        group: the ranks that meet; the world if None.
        timeout: seconds, or a timedelta. The ranks then meet over the group's store, whatever the backend. If
            None it is torch's barrier, with the group's deadline.

    Raises:
        DistBackendError: time is up; the message names the ranks that did not come, by their global ranks.

    Example::

        barrier(timeout=60)
    """
    members, _ = groups.find_or_alone(group, "barrier")
    if members is None:
        return
    if timeout is None:
        dist.barrier(group=members.group)
        return
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    waiting = StoreBarrier(members, "barrier")
    waiting.arrive()
    waiting.wait("barrier", seconds)
