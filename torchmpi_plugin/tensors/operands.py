"""Tensors as C reads them where torch does not show them to it."""

from __future__ import annotations

import torch

from .dtypes import DTYPES


class Plain(tuple):  # type: ignore[type-arg]  # a named one takes a call of Python's to make
    """A tensor and the memory of its elements, which lie there in order.

    The tensor, address, number of elements, bytes of each, rows, dtype, C's number of that (-1: none), shape and dtype
    for the flight recorder, device (None: host memory).
    """

    __slots__ = ()


def plain(tensor: torch.Tensor, buffer: torch.Tensor) -> Plain:
    """The user's ``tensor``, whose elements are or will be in the contiguous ``buffer``."""
    dtype, shape = buffer.dtype, tensor.shape
    return Plain(
        (
            *(tensor, buffer.data_ptr(), buffer.numel(), dtype.itemsize, shape[0] if shape else 1),
            *(dtype, DTYPES.get(dtype, -1), (shape, dtype), None if buffer.is_cpu else buffer.device),
        )
    )
