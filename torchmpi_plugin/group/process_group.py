"""``ProcessGroupMPI``: the c10d methods, by families, and what belongs to none.

Each method checks the arguments, picks buffers and hands over to C, and returns a Work. With ``asyncOp`` false the
operation is complete when it returns. Each is written for one form of its arguments, the one that torch itself calls;
``forms.py`` makes that of all others, and ``call_path.py`` gives methods their other names.

- ``exchanging.py``: all_gather, gather, scatter, all_to_all
- ``reducing.py``: all_reduce, reduce, reduce_scatter; ``sparse.py`` and ``device_reductions.py`` beside it
- ``several.py``: several tensors for a rank
- ``messages.py``: send, recv, and exchanges made of messages
- ``windows.py``: one-sided communication; ``splitting.py``: groups made of the group's ranks
- ``group.py``: deadlines, and how an operation is started; below it ``failures.py`` (failures), ``hooks.py``,
  ``identity.py`` (what torch asks a group about itself)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..diagnosis.comparison import Call
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..mpi import runtime
from ..tensors import arguments
from ..tensors.arguments import bytes_of, readable, writable
from . import call_path, several
from .exchanging import Exchanging, Tensors
from .reducing import Reducing
from .splitting import Splitting
from .windows import Windows


class ProcessGroupMPI(Exchanging, Reducing, Splitting, Windows):
    """A ``torch.distributed`` process group on MPI.

    The arguments are c10d's; ranks are ranks of the group. Unless said otherwise a method raises ValueError
    or TypeError for arguments that cannot work, before anything is sent, and its Work raises
    DistBackendError when the operation fails or its time is up.
    """

    def barrier(self, opts: Any) -> Work:
        """Wait until every rank has come."""
        sync = not getattr(opts, "asyncOp", True)
        group = self._begin_collective("barrier")
        if self._calls.compares:
            self._compare("barrier", Call(), opts)
        return self._issue("barrier", self._lib.mpp_barrier, (group, SLICE_NS if sync else 0), sync, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait over torch's store until every rank has come; an error names those that have not, always all of them."""
        runtime.refuse_in_forked_child("monitored_barrier")
        self.checkin.barrier(self.timeout if timeout is None else timeout, "monitored_barrier")

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Copy the root's tensor to every rank's; the root's own is only read.

        Of several tensors the root gives number ``rootTensor`` to all.
        """
        tensor, others = several.one_of(tensors, opts.rootTensor, "broadcast")
        root = arguments.check_root(opts.rootRank, self._size, "broadcast")
        sync = not opts.asyncOp
        buffer, finish = (readable(tensor), None) if root == self._rank else writable(tensor, "broadcast")
        group = self._begin_collective("broadcast")
        if self._calls.compares:
            self._compare("broadcast", Call(tensor, [tensor.numel()], root=root), opts)
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        wait_ns = SLICE_NS if sync else 0
        operands = group, buffer.data_ptr(), bytes_of(buffer), root, staging, wait_ns
        finish = several.copied(buffer, others, "broadcast", finish)
        return self._issue("broadcast", self._lib.mpp_broadcast, operands, sync, list(tensors), opts, finish, buffer)


call_path.install(ProcessGroupMPI)
