"""The methods of a group that C carries out (python/bridge.c), and what it is told once for that.

From torch's call to the engine and back no line of Python runs for dense tensors in host memory, where torch shows its
tensors to C (DLPack's table of functions, from torch 2.10 on). Of everything else ``operands.py`` makes such tensors.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from .. import _bridge, operations, torch_internals
from ..diagnosis import flight_recorder, frames
from ..engine import profiling
from ..engine.engine import Engine
from ..engine.work import PendingWork, Work
from ..tensors.dtypes import AVG, DTYPES, OPERATIONS, PREMUL_SUM, premul_factor
from . import coalesced, forms, starting
from .operands import Method, Plain

os.register_at_fork(after_in_child=_bridge.disconnect)


#: Functions of mpiplus's own that are carried out as methods of c10d are: they take a group first.
OWN = {row.name: Method(row).in_c for row in operations.OWN}


def install(group_class: type) -> None:
    """Give a class of groups c10d's methods, which take all of its forms, under all their names."""
    methods: dict[str, Any] = {row.method: Method(row).in_c for row in operations.ROWS if row.start}
    methods |= coalesced.METHODS
    for name in (*methods, *forms.ALIASES):
        setattr(group_class, name, methods[forms.ALIASES.get(name, name)])


@functools.cache
def connect(engine: Engine) -> None:
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
