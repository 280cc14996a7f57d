"""The end of a group."""

from __future__ import annotations

from .. import torch_internals
from ..engine import engine, grace
from ..mpi import runtime
from . import statistics
from .group import ProcessGroupMPI as Group
from .registration import close_all

#: How long rank 0 keeps the world's store for ranks that leave at about the same time.
_DEPARTURES_SECONDS = 1.0


def shutdown(group: Group) -> None:
    """Free the group's communicator and memory, once its operations are complete. Idempotent.

    What does not complete within the exit grace fails, and at once what a thread waits for; what MPI has begun of
    it is left for the end of the process.
    """
    if runtime.forked:
        return
    group._engine.check_thread(f"destroying {group.label}")
    is_leaving = not group._left and not group.closed
    group.leave()
    if is_leaving and group.serves_store:
        group.checkin.wait_for_departures(_DEPARTURES_SECONDS)
    statistics.end(group)
    group.take_back_failed()
    # No thread begins anything from here on; what is under way is waited for, and keeps the memory that it needs.
    group._calls.broken = group._calls.broken or f"{group.label} is destroyed"
    closed, group.closed = group.closed, True
    if not closed:
        torch_internals.forget_default(group)
        _close_windows(group)
        grace.wait_until(lambda: _is_idle(group))
        if group._lib.mpp_group_active(group._handle):
            group._lib.mpp_group_abort(group._handle)
            grace.wait_until(lambda: not engine.is_waited_for(group))
    with group.diagnosis.lock:
        freed = not group.second_halves and group.communicator.free()
    if freed and group.user_communicator is not None:
        with runtime.exclusive():
            if group.user_communicator:  # not null: the user has not freed it
                group.user_communicator.Free()
        group.user_communicator = None


def _close_windows(group: Group) -> None:
    closing, group.registrations = group.registrations, []
    if any(one.takes_messages for one in closing):
        group.communicator.may_be_sent_to = True  # others may not know yet that the window is closed
    close_all(closing, f"{group.label} is destroyed")


def _is_idle(group: Group) -> bool:
    """Return whether nothing is under way that may still complete, and that nobody is to be freed from."""
    left = [work for work in group._engine.pending() if work.group is group]
    active = int(group._lib.mpp_group_active(group._handle)) + len(group.second_halves)
    return active == sum(work.abandoned for work in left) or engine.is_waited_for(group)
