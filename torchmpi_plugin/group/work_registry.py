"""torch's registry of Works, in which ``wait_tensor`` finds what a tensor is to wait for.

Inside ``allow_inflight_collective_as_graph_input_ctx()`` all that is asynchronous is put there, so that compiled code
can wait for what was begun before it. Backends in C++ take an operation out in ``wait()``. Others can do so by
``wait_tensor`` alone, which takes out all that is on the tensor's storage, and waits for it.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..engine.work import Work

#: Whether this process is inside that context.
wanted: Callable[[], bool] = torch_internals.find(f"{torch_internals.C10D}:_allow_inflight_collective_as_graph_input")
register: Callable[[torch.Tensor, Any], None] = torch_internals.find(f"{torch_internals.C10D}:_register_work")


class _Holder(dist.ProcessGroup):
    """Gives Works to C++.

    C++ keeps the C++ half of an object alone. What a process group in Python returns to it is held whole, so each Work
    takes that way: as that of a barrier which there is not.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.handed = threading.local()

    def barrier(self, opts: Any) -> Any:
        """Called by C++, in :func:`hold`."""
        return self.handed.work


_holder = functools.cache(_Holder)


def hold(work: Any) -> Any:
    """A Work of C++'s that keeps one of ours, and asks it."""
    holder = _holder()
    holder.handed.work = work
    try:
        return dist.ProcessGroup.barrier(holder, dist.distributed_c10d.BarrierOptions())
    finally:
        del holder.handed.work


#: How many operations on a storage, by its address, are in the registry and not complete.
_under_way: Counter[int] = Counter()
_lock = threading.RLock()  # a signal handler may complete operations


def enter(work: Work, tensors: list[torch.Tensor]) -> None:
    """Have ``wait_tensor`` of these wait for an operation until it is complete, and raise its error if it fails."""
    held = hold(work)
    with _lock:
        for tensor in tensors:
            _under_way[tensor.untyped_storage().data_ptr()] += 1
            register(tensor, held)
    work.later_future().add_done_callback(lambda _: _leave(work, tensors))


def _leave(work: Work, tensors: list[torch.Tensor]) -> None:
    if work.exception() is not None:
        return
    with _lock:  # nothing comes that would have to be waited for
        for tensor in tensors:
            storage = tensor.untyped_storage().data_ptr()
            _under_way[storage] -= 1
            if not _under_way[storage]:
                del _under_way[storage]
                torch.ops._c10d_functional.wait_tensor(tensor)
