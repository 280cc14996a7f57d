"""A tensor that the other ranks may write to, from ``tensor_register`` to ``tensor_deregister``."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import forks
from ..engine import engine
from ..errors import DistBackendError
from ..node.shared_files import Share
from ..tensors import allocation

if TYPE_CHECKING:
    from ..node.processes import Process

#: Enough for any shape.
RECORD_BYTES = 2048
#: What groups left while MPI was still writing to it.
_unfinished: list[Registration] = []


class Record(NamedTuple):
    """A rank's message to the others about its tensor."""

    number: int  # the registration's, in the group, as far as this rank knows
    window: int  # the window's, in the group
    dtype: torch.dtype
    shape: torch.Size
    memory: Share | None  # where the tensor lies
    offset: int  # of the tensor in its memory, in bytes
    counters: Share | None  # where signals to this rank are counted

    @classmethod
    def of(cls, number: int, window: int, tensor: torch.Tensor, counters: torch.Tensor) -> Record:
        """This rank's."""
        memory, counted_at = allocation.share_of(tensor), allocation.share_of(counters)
        offset = tensor.storage_offset() * tensor.element_size()
        return cls(number, window, tensor.dtype, tensor.shape, memory, int(offset), counted_at)

    def encoded(self) -> torch.Tensor:
        """As bytes, as many for each rank."""
        return torch.frombuffer(bytearray(pickle.dumps(self).ljust(RECORD_BYTES)), dtype=torch.uint8)

    @staticmethod
    def decoded(row: torch.Tensor) -> Record:
        found: Record = pickle.loads(bytes(row.tolist()))
        return found


class Peer(NamedTuple):
    """A rank's tensor as this rank sees it; itself and the counters, if this process can write there."""

    dtype: torch.dtype
    shape: torch.Size
    tensor: torch.Tensor | None
    counters: torch.Tensor | None


def _find(record: Record, process: Process | None) -> Peer:
    dtype, shape = record.dtype, record.shape
    memory = allocation.map_from(process, record.memory)
    counters = None if memory is None else allocation.map_from(process, record.counters)
    if memory is None or counters is None:
        return Peer(dtype, shape, None, None)
    part = memory[record.offset : record.offset + shape.numel() * dtype.itemsize]
    return Peer(dtype, shape, part.view(dtype).view(shape), counters)


class Registration:
    """The tensor, those of the others, and the C window.

    Attributes:
        handle: the C window, valid as long as this object.
        peers: every rank's tensor.
        takes_messages: some rank of the group reaches some other's tensor by messages.
        works: signals that are under way, or waited for.
    """

    def __init__(
        self, running: engine.Engine, group: int, number: int, tensor: torch.Tensor, counters: torch.Tensor
    ) -> None:
        self._lib, self._engine = running.lib, running
        self._kept = tensor, counters
        self.peers: list[Peer] = []
        self.takes_messages = True
        self.works: weakref.WeakSet[Any] = weakref.WeakSet()
        length = tensor.nbytes
        self.closed = True
        self.handle: int = self._lib.mpp_window_new(group, number, tensor.data_ptr(), length, counters.data_ptr())
        if not self.handle:
            raise MemoryError("mpiplus: no memory for a window")
        self.closed = False

    def meet(self, rank_here: int, processes: Sequence[Process | None], records: list[Record]) -> torch.Tensor:
        """Map what can be mapped; of each rank, whether its tensor was."""
        for rank, record in enumerate(records):
            if rank == rank_here:
                tensor, counters = self._kept
                self.peers.append(Peer(tensor.dtype, tensor.shape, tensor, counters))
                continue
            peer = _find(record, processes[rank])
            self.peers.append(peer)
            if peer.tensor is not None and peer.counters is not None:
                self._lib.mpp_window_reach(self.handle, rank, peer.tensor.data_ptr(), peer.counters.data_ptr())
        return torch.tensor([peer.tensor is not None for peer in self.peers], dtype=torch.uint8, device="cpu")

    def listen(self) -> None:
        """Take what others send, whatever this rank does meanwhile."""
        self._engine.poll_in_background()
        if self._lib.mpp_window_listen(self.handle):
            raise MemoryError("mpiplus: no memory for a window")

    def close(self, why: str) -> bool:
        """Nothing comes in any more; False (and nothing closed) while MPI writes to the tensor."""
        for work in list(self.works):
            work.if_cancelled = DistBackendError(f"{work}: {why}")
        self.closed = not self._lib.mpp_window_close(self.handle)
        return self.closed

    def __del__(self) -> None:
        if self.closed and self.handle and forks and not forks.forked:  # as in Communicator
            self._lib.mpp_window_release(self.handle)


def close_all(closing: Sequence[Registration], why: str) -> None:
    """The end of a group: nothing comes in any more."""
    engine.wait_within_grace(lambda: all([one.close(why) for one in closing]))
    _unfinished.extend(one for one in closing if not one.closed)
