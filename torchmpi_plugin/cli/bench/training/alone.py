"""A group for steps "alone": its operations send nothing and are complete at once; what they give is finite numbers.

A step on it does all that training does but communicate. What an operation would write is written, once, by a copy of
what this rank has: a computation on memory that nobody wrote to may meet numbers that no training has, and that take a
processor longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..front_end import Complete, EmptyGroup

Value = TypeVar("Value")


def completed(value: Value, tensors: Sequence[Tensor]) -> torch.futures.Future[Value]:
    """Return a future that has this value, in which these are the tensors."""
    devices: list[Any] = [tensor.device for tensor in tensors if not tensor.is_cpu]
    future: torch.futures.Future[Value] = torch.futures.Future(devices=devices)
    future.set_result(value)
    return future


class _Result(Complete):
    """The same with tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return completed(self._tensors, self._tensors)


class AloneGroup(EmptyGroup):
    """Takes the calls of the ways to train; the data of other ranks are copies of this rank's."""

    backend = "mpiplus-alone"

    def _leave(self, tensors: Any, *_: Any, opts: Any = None) -> dist.Work:
        return _Result(tensors)

    @torch.no_grad()
    def _gather(self, output: Tensor, piece: Tensor, *_: Any, opts: Any = None) -> dist.Work:
        output.view(self.size(), -1).copy_(piece.view(1, -1).expand(self.size(), -1))
        return _Result([output])

    @torch.no_grad()
    def _scatter(self, output: Tensor, whole: Tensor, *_: Any, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(whole.view(self.size(), -1)[self.rank()])
        return _Result([output])

    @torch.no_grad()
    def recv(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        """Write zeros."""
        for tensor in tensors:
            tensor.zero_()
        return _Result(tensors)

    def barrier(self, *_: Any, opts: Any = None) -> dist.Work:
        """Wait for nobody."""
        return _Result([])

    allreduce = broadcast = send = _leave  # type: ignore[assignment]
    # torch's older and newer names for each.
    all_gather_single = _allgather_base = _gather  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base = _scatter  # type: ignore[assignment]
