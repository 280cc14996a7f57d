"""Process groups that send nothing.

What is left of a call on the one is torch's own front end, and reading the clock. A step of training on the other does
all that it does but communicate. What an operation would write is written, once, by a copy of what this rank has: a
computation on memory that nobody wrote to may meet numbers that no training has, and that take a processor longer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Complete(dist.Work):
    """Work that was complete before it was asked for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class EmptyGroup(dist.ProcessGroup):
    """Takes the calls that ``mpiplus bench`` makes, and says that they are done."""

    backend = "mpiplus-front-end"

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the overload for Python subclasses
        self._name = name
        self._complete = Complete()

    def _done(self, *_: Any, opts: Any = None) -> dist.Work:
        return self._complete

    allreduce = barrier = broadcast = send = recv = _done
    # torch's older and newer names for each.
    all_gather_single = _allgather_base = _done
    reduce_scatter_single = _reduce_scatter_base = _done
    all_to_all_single = alltoall_base = _done

    # ---- what torch asks of every group; those of the base class need a backend in C++ ----

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return []  # from torch 2.15 on, its flight recorder would look for a backend for each

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        return self.backend

    def shutdown(self) -> None:
        """Nothing is left to end."""

    @classmethod
    def of_all_ranks(cls) -> dist.ProcessGroup:
        """Make one beside the groups that there are."""

        def create(options: Any, _: Any = None) -> EmptyGroup:
            return cls(options.group_rank, options.group_size, options.group_id)

        if not dist.is_backend_available(cls.backend):
            dist.Backend.register_backend(cls.backend, create, extended_api=True, devices=["cpu"])
        group: dist.ProcessGroup = dist.new_group(backend=cls.backend)
        return group


class AloneGroup(EmptyGroup):
    """Takes the calls of the ways to train; the data of other ranks are copies of this rank's."""

    backend = "mpiplus-alone"

    @torch.no_grad()
    def _gather(self, output: Tensor, piece: Tensor, *_: Any, opts: Any = None) -> dist.Work:
        output.view(self.size(), -1).copy_(piece.view(1, -1).expand(self.size(), -1))
        return self._complete

    @torch.no_grad()
    def _scatter(self, output: Tensor, whole: Tensor, *_: Any, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(whole.view(self.size(), -1)[self.rank()])
        return self._complete

    @torch.no_grad()
    def recv(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        for tensor in tensors:
            tensor.zero_()
        return self._complete

    # torch's older and newer names for each.
    all_gather_single = _allgather_base = _gather
    reduce_scatter_single = _reduce_scatter_base = _scatter
