"""The methods of :class:`ProcessGroupMPI`: operations, and functions that take the group.

C carries each of them out (python/bridge.c). It takes one form of the arguments, the one that torch
itself calls, and plain tensors; ``forms.py`` and ``operands.py`` make that of all others. A method returns a Work. With
``asyncOp`` false the operation is complete when it returns. From torch's call to the engine and back no line of Python
runs for dense tensors in host memory, where torch shows its tensors to C (DLPack's table of functions, from torch 2.10
on).

- ``starting.py``: what Python has to say of a call before it begins
- ``coalesced.py``: operations that consist of others; ``several.py``: several tensors for a rank
- ``sparse.py``, ``device_reductions.py``: reductions that are not C's
- ``windows.py``: one-sided communication; ``splitting.py``: groups made of the group's ranks
- ``ending.py``: the end of a group; ``failures.py``: what becomes of operations that fail
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
from ..engine import profiling
from ..engine.engine import Engine
from ..engine.work import PendingWork, Work
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, premul_factor
from . import coalesced, ending, forms, splitting, starting, windows
from .group import ProcessGroupMPI
from .operands import Method, Plain

__all__ = ["OWN", "ProcessGroupMPI"]

os.register_at_fork(after_in_child=_bridge.disconnect)

#: Functions of mpiplus's own that are carried out as methods of c10d are: they take a group first.
OWN = {row.name: Method(row).in_c for row in operations.OWN}


@functools.cache
def _connect(engine: Engine) -> None:
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
        *(engine._registry, engine.watch, frames.NOT_THE_USERS),
        *(_front_end(), Plain, starting.prepare, starting.follow, premul_factor, starting.reduction),
    )
    types = (torch.Tensor, torch.nn.Parameter)
    #: By torch's number of an operation, which is its hash: ours, and whether it is AVG, and PREMUL_SUM.
    numbers = {int(kind): (code, kind == AVG, kind == PREMUL_SUM) for kind, code in OPERATIONS.items()}
    _bridge.connect(engine.lib.mpp_entries_address(), capsule, types, samples, numbers, objects)


def _front_end() -> tuple[CodeType, ...]:
    """Return the callers of a group that ask whether there is a Work, where the call was not to be asynchronous."""
    codes = {inspect.unwrap(value).__code__ for value in vars(c10d).values() if type(value) is FunctionType}
    return tuple(code for code in codes if "async_op" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


_methods: dict[str, Any] = {row.method: Method(row).in_c for row in operations.ROWS if row.start} | coalesced.METHODS
for _name in (*_methods, *forms.ALIASES):
    setattr(ProcessGroupMPI, _name, _methods[forms.ALIASES.get(_name, _name)])
ProcessGroupMPI._connect = staticmethod(_connect)
for _method in (
    *(ending.shutdown, splitting.split_group, splitting.shrink),
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
