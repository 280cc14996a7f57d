"""``ProcessGroupMPI``: the c10d methods, by families, and what belongs to none.

Each method checks the arguments, picks buffers and hands over to C, and returns a Work. With ``asyncOp`` false the
operation is complete when it returns. Older torch calls some operations by other names; both are here.

- ``exchanging.py``: all_gather, gather, scatter, all_to_all
- ``reducing.py``: all_reduce, reduce, reduce_scatter; ``sparse.py`` and ``device_reductions.py`` beside it
- ``messages.py``: send, recv, and exchanges made of messages
- ``windows.py``: one-sided communication; ``splitting.py``: groups made of the group's ranks
- ``group.py``: deadlines, and how an operation is started; below it ``outcomes.py`` (failures), ``hooks.py``,
  ``identity.py`` (what torch asks a group about itself)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from ..diagnosis.comparison import Call
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..tensors import arguments
from ..tensors.arguments import bytes_of, single, writable
from . import call_path
from .exchanging import Exchanging
from .messages import options_of
from .reducing import Reducing
from .splitting import Splitting
from .windows import Windows


class ProcessGroupMPI(Exchanging, Reducing, Splitting, Windows):
    """A ``torch.distributed`` process group on MPI.

    The arguments are c10d's; ranks are ranks of the group. Unless said otherwise a method raises ValueError
    or TypeError for arguments that cannot work, before anything is sent, and its Work raises
    DistBackendError when the operation fails or its time is up.
    """

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has come."""
        opts = options_of(c10d.BarrierOptions, opts, timeout)
        sync = not getattr(opts, "asyncOp", True)
        group = self._begin_collective("barrier")
        if self._calls.compares:
            self._compare("barrier", Call(), opts)
        return self._issue("barrier", self._lib.mpp_barrier, (group, SLICE_NS if sync else 0), sync, [], opts)

    def broadcast(
        self, tensors: Any, opts: Any = None, *, root: int | None = None, timeout: timedelta | None = None
    ) -> Work:
        """Copy the root's tensor to every rank's."""
        opts = options_of(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        tensor = single(tensors, "broadcast")
        root = arguments.check_root(opts.rootRank, self._size, "broadcast")
        sync = not opts.asyncOp
        buffer, finish = writable(tensor, "broadcast", load=root == self._rank)
        group = self._begin_collective("broadcast")
        if self._calls.compares:
            self._compare("broadcast", Call(tensor, [tensor.numel()], root=root), opts)
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        wait_ns = SLICE_NS if sync else 0
        operands = group, buffer.data_ptr(), bytes_of(buffer), root, staging, wait_ns
        return self._issue("broadcast", self._lib.mpp_broadcast, operands, sync, [tensor], opts, finish, buffer)


call_path.install(ProcessGroupMPI)
