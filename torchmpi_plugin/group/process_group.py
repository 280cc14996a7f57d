"""``ProcessGroupMPI``: the operations of a group, and how it ends. What else it is, is in ``group.py``.

C carries each operation out (python/bridge.c). It takes one form of the arguments, the one that torch
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

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import _bridge, forks, operations, torch_internals
from ..diagnosis import flight_recorder, frames
from ..engine import engine, profiling
from ..engine.work import PendingWork, Work
from ..mpi import runtime
from ..names import counted, log
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, premul_factor
from . import coalesced, forms, registration, splitting, starting, statistics, windows, work_registry
from .group import Group
from .operands import METHODS, Method, Plain

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
        *(Work, PendingWork, threading.RLock),
        *(profiling.wanted, work_registry.wanted, forms.modes, vars(flight_recorder)),
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


#: How long rank 0 keeps the world's store for ranks that leave at about the same time.
_DEPARTURES_SECONDS = 1.0


class ProcessGroupMPI(Group):
    """A ``torch.distributed`` process group on MPI.

    The arguments are c10d's; ranks are ranks of the group. Unless said otherwise a method raises ValueError
    or TypeError for arguments that cannot work, before anything is sent, and its Work raises
    DistBackendError when the operation fails or its time is up.

    Thread safety: operations may be called from several threads, on one group only in an order that all
    ranks share, which is the caller's affair.
    """

    _connect = staticmethod(_connect)

    # ---- collectives and messages: operations.py says what tensors each takes ----

    allreduce = METHODS["allreduce"].in_c
    allreduce_coalesced = coalesced.allreduce_coalesced
    barrier = METHODS["barrier"].in_c
    broadcast = METHODS["broadcast"].in_c
    reduce = METHODS["reduce"].in_c
    allgather = METHODS["allgather"].in_c
    allgather_coalesced = coalesced.allgather_coalesced
    all_gather_single = allgather_into_tensor = _allgather_base = METHODS["_allgather_base"].in_c
    all_gather_single_coalesced = allgather_into_tensor_coalesced = coalesced.allgather_into_tensor_coalesced
    reduce_scatter = METHODS["reduce_scatter"].in_c
    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base = METHODS["_reduce_scatter_base"].in_c
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = coalesced.reduce_scatter_tensor_coalesced
    gather = METHODS["gather"].in_c
    gather_single = gather_into_tensor = METHODS["gather_single"].in_c
    scatter = METHODS["scatter"].in_c
    alltoall = METHODS["alltoall"].in_c
    all_to_all_single = alltoall_base = METHODS["alltoall_base"].in_c
    send = METHODS["send"].in_c
    recv = METHODS["recv"].in_c
    recv_anysource = METHODS["recv_anysource"].in_c

    # ---- windows, and groups made of this one's ranks ----

    new_window = windows.new_window
    allocate_tensor = windows.allocate_tensor
    supports_tensor_alloc = windows.supports_tensor_alloc
    split_group = splitting.split_group
    merge_remote_group = splitting.merge_remote_group
    shrink = splitting.shrink

    # ---- the end of a group ----

    def shutdown(self) -> None:
        """Free the group's communicator and memory, once its operations are complete. Idempotent.

        What does not complete within the exit grace fails, and at once what a thread waits for; what MPI has begun of
        it is left for the end of the process.
        """
        if forks.forked:
            return
        self._engine.check_thread(f"destroying {self.label}")
        is_leaving = not self._left and not self.closed
        self.leave()
        if is_leaving and self.serves_store:
            self.checkin.wait_for_departures(_DEPARTURES_SECONDS)
        statistics.end(self)
        self.take_back_failed()
        unseen = [work for work in self._engine.unseen() if work.group is self]
        # No thread begins anything from here on; what is under way is waited for, and keeps the memory that it needs.
        self._calls.broken = self._calls.broken or f"{self.label} is destroyed"
        closed, self.closed = self.closed, True
        if not closed:
            torch_internals.forget_default(self)
            self._close_windows()
            engine.wait_within_grace(self._is_idle)
            if self._lib.mpp_group_active(self._handle):
                self._lib.mpp_group_abort(self._handle)
                engine.wait_within_grace(lambda: not engine.is_waited_for(self))
            if lost := [work for work in unseen if not work.is_success()]:
                count, first = counted(len(lost), "operation"), lost[0].exception() or lost[0]
                log.warning("mpiplus: %s is destroyed with %s pending: %s", self.label, count, first)
        with self.diagnosis.lock:
            freed = not self.second_halves and self.communicator.free()
        if freed and self.user_communicator is not None:
            users, self.user_communicator = self.user_communicator, None
            try:
                with runtime.exclusive():
                    if users:  # not null: the user has not freed it
                        users.Free()
            except runtime.mpi().Exception as error:  # as an attribute on it has it, which a library put there
                log.warning("mpiplus: the communicator that get_comm() gave of %s stays: %s", self.label, error)

    def _close_windows(self) -> None:
        closing, self.registrations = self.registrations, []
        if any(one.takes_messages for one in closing):
            self.communicator.may_be_sent_to = True  # others may not know yet that the window is closed
        registration.close_all(closing, f"{self.label} is destroyed")

    def _is_idle(self) -> bool:
        """Return whether nothing is under way that may still complete, and that nobody is to be freed from."""
        left = [work for work in self._engine.pending() if work.group is self]
        active = int(self._lib.mpp_group_active(self._handle)) + len(self.second_halves)
        return active == sum(work.abandoned for work in left) or engine.is_waited_for(self)


#: Where a group has no backend in C++ to say so itself, these end in words from inside torch.
_OF_BACKENDS = () if torch_internals.has_python_backends() else splitting.LEFT_TO_BACKENDS
for _name, _what in {**vars(dist.ProcessGroup), **vars(torch_internals.backend_class())}.items():
    if _name in _OF_BACKENDS or not (isinstance(_what, type) or hasattr(ProcessGroupMPI, _name)):
        _refusal = splitting.refusal(_name)
        setattr(ProcessGroupMPI, _name, property(_refusal) if isinstance(_what, property) else _refusal)
