"""The methods of :class:`ProcessGroupMPI`: operations, and functions that take the group.

C carries each of them out (python/bridge.c). It takes one form of the arguments, the one that torch
itself calls, and plain tensors; ``forms.py`` and ``operands.py`` make that of all others. A method returns a Work. With
``asyncOp`` false the operation is complete when it returns. From torch's call to the engine and back no line of Python
runs for dense tensors in host memory, where torch shows its tensors to C (DLPack's table of functions, from torch 2.10
on).

- ``starting.py``: what Python has to say of a call before it begins
- ``operands.py``: what C is given of others; ``coalesced.py``: operations that consist of others
- ``sparse.py``, ``device_reductions.py``: reductions that are not C's
- ``windows.py``: one-sided communication; ``splitting.py``: groups made of the group's ranks
- ``failures.py``: what becomes of operations that fail
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import _bridge, operations, torch_internals
from ..diagnosis import flight_recorder, frames
from ..engine import engine, profiling
from ..engine.work import PendingWork, Work
from ..mpi import runtime
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, premul_factor
from . import coalesced, forms, registration, splitting, starting, statistics, windows
from .group import ProcessGroupMPI
from .operands import Method, Plain

__all__ = ["OWN", "ProcessGroupMPI"]

os.register_at_fork(after_in_child=_bridge.disconnect)

#: Functions of mpiplus's own that are carried out as methods of c10d are: they take a group first.
OWN = {row.name: Method(row).in_c for row in operations.OWN}


@functools.cache
def _connect(started: engine.Engine) -> None:
    """Tell C of the engine; once per process."""
    capsule = torch_internals.tensor_exchange()
    samples = {
        torch.empty(1, dtype=dtype, device="cpu"): (
            *(dtype, dtype.itemsize, code),
            *(dtype.is_floating_point or dtype.is_complex, dtype.is_complex),
        )
        for dtype, code in DTYPES.items()
        if dtype != torch.complex32  # torch warns of it
    }
    objects = (
        *(Work, PendingWork, threading.RLock, profiling.wanted, forms.modes, vars(flight_recorder)),
        *(started._registry, started.watch, frames.NOT_THE_USERS),
        *(_front_end(), Plain, starting.prepare, starting.follow, premul_factor, starting.reduction),
    )
    types = (torch.Tensor, torch.nn.Parameter)
    #: By torch's number of an operation, which is its hash: ours, and whether it is AVG, and PREMUL_SUM.
    numbers = {int(kind): (code, kind == AVG, kind == PREMUL_SUM) for kind, code in OPERATIONS.items()}
    _bridge.connect(started.lib.mpp_entries_address(), capsule, types, samples, numbers, objects)


def _front_end() -> tuple[CodeType, ...]:
    """Return the callers of a group that ask whether there is a Work, where the call was not to be asynchronous."""
    codes = {inspect.unwrap(value).__code__ for value in vars(c10d).values() if type(value) is FunctionType}
    return tuple(code for code in codes if "async_op" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


# ---- the end of a group ----

#: How long rank 0 keeps the world's store for ranks that leave at about the same time.
_DEPARTURES_SECONDS = 1.0


def shutdown(group: ProcessGroupMPI) -> None:
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
        engine.wait_within_grace(lambda: _is_idle(group))
        if group._lib.mpp_group_active(group._handle):
            group._lib.mpp_group_abort(group._handle)
            engine.wait_within_grace(lambda: not engine.is_waited_for(group))
    with group.diagnosis.lock:
        freed = not group.second_halves and group.communicator.free()
    if freed and group.user_communicator is not None:
        with runtime.exclusive():
            if group.user_communicator:  # not null: the user has not freed it
                group.user_communicator.Free()
        group.user_communicator = None


def _close_windows(group: ProcessGroupMPI) -> None:
    closing, group.registrations = group.registrations, []
    if any(one.takes_messages for one in closing):
        group.communicator.may_be_sent_to = True  # others may not know yet that the window is closed
    registration.close_all(closing, f"{group.label} is destroyed")


def _is_idle(group: ProcessGroupMPI) -> bool:
    """Return whether nothing is under way that may still complete, and that nobody is to be freed from."""
    left = [work for work in group._engine.pending() if work.group is group]
    active = int(group._lib.mpp_group_active(group._handle)) + len(group.second_halves)
    return active == sum(work.abandoned for work in left) or engine.is_waited_for(group)


_methods: dict[str, Any] = {row.method: Method(row).in_c for row in operations.ROWS if row.start} | coalesced.METHODS
for _name in (*_methods, *forms.ALIASES):
    setattr(ProcessGroupMPI, _name, _methods[forms.ALIASES.get(_name, _name)])
ProcessGroupMPI._connect = staticmethod(_connect)
for _method in (
    *(shutdown, splitting.split_group, splitting.shrink),
    *(windows.new_window, windows.allocate_tensor, windows.supports_tensor_alloc),
):
    setattr(ProcessGroupMPI, _method.__name__, _method)
#: Where a group has no backend in C++ to say so itself, these end in words from inside torch.
_OF_BACKENDS = () if torch_internals.has_python_backends() else splitting.LEFT_TO_BACKENDS
#: With this one it would answer None.
_OF_BACKENDS += ("merge_remote_group",)
for _name, _what in {**vars(dist.ProcessGroup), **vars(torch_internals.backend_class())}.items():
    if _name in _OF_BACKENDS or not (isinstance(_what, type) or hasattr(ProcessGroupMPI, _name)):
        _refusal = splitting.refusal(_name)
        setattr(ProcessGroupMPI, _name, property(_refusal) if isinstance(_what, property) else _refusal)
