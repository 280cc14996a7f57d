"""Events for torch's profiler: for each operation those that other backends' have, by which trace tools go.

"mpiplus:all_reduce" begins with the call, and ends when the operation is complete, which for an asynchronous one is on
another thread, or with the profiler: torch frees its events then, and an end that came later would be written to other
memory. "c10d::allreduce_" is the call alone, as of torch's own operator, with sizes and dtypes: those of the
tensors, and in the words that NCCL's "record_param_comms" has for them. An event of that name itself needs what only
C++ can set, and the profiler crashes without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import operations, torch_internals
from . import profile_tracks
from .work import Work

#: Whether this thread is being profiled.
wanted: Callable[[], bool] = torch_internals.find("torch.autograd:_profiler_enabled")


#: By thread, those of the operation that it is about to start: until that is complete, and of the call.
events: dict[int, tuple[Any, Any]] = {}
#: What ends the events of operations under way. The lock is held until an event has ended; reentrant, as what is
#: destroyed meanwhile may complete another operation.
_open: set[Callable[[], None]] = set()
_lock = threading.RLock()


def _end_one(ending: Callable[[], None]) -> None:
    with _lock:
        if ending in _open:
            _open.remove(ending)
            ending()


_STOP = "torch.autograd.profiler:_disable_profiler"
_stop: Callable[[], Any] = torch_internals.find(_STOP)


def _end_all_and_stop() -> Any:
    """Return what torch's profilers call to stop."""
    with _lock:
        while _open:
            _open.pop()()
    return _stop()


torch_internals.put(_STOP, _end_all_and_stop)
_profile = torch.autograd.profiler.profile
_profile.export_chrome_trace = profile_tracks.writing(_profile.export_chrome_trace)  # type: ignore[method-assign]


def begin(
    operation: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], group: dict[str, Any]
) -> None:
    """An operation begins on this thread.

    Args:
        group: what is to be said of its group.
    """
    end(None)  # of one that raised before it came to its end
    row = operations.BY_NAME.get(operation)
    name = (row and row.operator) or f"{row.method if row else operation}_"
    tensors = [*inputs, *(tensor for tensor in outputs if all(tensor is not other for other in inputs))]
    said = {
        "Collective name": name.removesuffix("_"),
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "dtype": tensors[0].type().rpartition(".")[2].removesuffix("Tensor") if tensors else "",
        **group,
    }
    of_call = torch_internals.operator_event(f"c10d::{name}", tensors, said)
    both = events[threading.get_ident()] = torch.profiler.record_function(f"mpiplus:{operation}"), of_call
    for event in both:
        event.__enter__()


def end(work: Work | None) -> None:
    """The operation that began on this thread has become ``work``."""
    of_operation, of_call = events.pop(threading.get_ident(), (None, None))
    if of_operation is None:
        return
    of_call.__exit__(None, None, None)
    if work is None or work.finished:
        of_operation.__exit__(None, None, None)
    else:
        ending = torch_internals.ending(of_operation)
        _open.add(ending)
        work.get_future().add_done_callback(lambda _: _end_one(ending))
