"""Checks of what the user passed, and tensors as memory: everything before an operation may start.

All of it raises on the rank that made the mistake, before anything is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from .. import torch_internals
from . import device

Finish = Callable[[], None] | None


class WithoutMemoryError(RuntimeError):
    """A tensor whose elements are not in memory of its own: a wrapper around others, or its storage was freed.

    The methods of a group catch it once, and let torch's dispatcher take the tensor apart (group/dispatching.py).
    """


class ArgumentError(ValueError, RuntimeError):
    """A wrong value: a ValueError, and what other backends raise."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A wrong dtype: a TypeError, and what other backends raise."""


class NoDeviceError(ArgumentError, WithoutMemoryError):
    """A meta tensor: torch's dispatcher has kernels for those, which move nothing."""


class NotDenseError(ArgumentError, NotImplementedError):
    """A tensor that is no plain array of numbers: a wrong argument; torch's dispatcher calls it not implemented."""


class NoTensorsError(ArgumentError, NotImplementedError):
    """A list without tensors: torch's dispatcher finds a kernel by them."""


def check(tensor: Any, operation: str, sparse: bool = False) -> torch.Tensor:
    """A CPU or CUDA tensor, dense (or COO where ``sparse``), or an exception that says what else it is."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{operation}: expected a torch.Tensor, not {type(tensor).__name__}")
    if not tensor.is_cpu and not device.is_cuda(tensor):
        raise (NoDeviceError if tensor.is_meta else ArgumentError)(
            f"{operation}: mpiplus moves CPU and CUDA tensors; this one is on {tensor.device}. Move it with .cpu(), or "
            f"use a backend for {tensor.device.type}"
        )
    if tensor.layout is not torch.strided:
        if sparse and tensor.layout is torch.sparse_coo:
            return tensor
        raise NotDenseError(f"{operation}: expected a dense tensor, not one with layout {tensor.layout}")
    if tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized"
        raise NotDenseError(f"{operation}: expected a dense tensor, not a {kind} one; pass its parts")
    try:  # of a storage that was freed only the tensor's offset is left
        address = tensor.data_ptr()
        has_memory = address != tensor.storage_offset() * tensor.element_size() or not tensor.numel()
    except RuntimeError:  # what torch.func makes of a tensor, also where it has no elements
        has_memory = False
    if not (has_memory or torch_internals.is_zero_tensor(tensor)):
        raise WithoutMemoryError(
            f"{operation}: the tensor (a {type(tensor).__name__} of shape {tuple(tensor.shape)}) has no memory of its "
            f"own. Was its storage freed, as untyped_storage().resize_(0) does? Pass one that has its elements"
        )
    return tensor


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order in memory: itself where they are, else a copy."""
    if not tensor.data_ptr() and torch_internals.is_zero_tensor(tensor):
        return tensor.detach().clone()  # contiguous() would leave it without memory
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_written(tensor: torch.Tensor, operation: str) -> None:
    """A result."""
    if torch_internals.shares_elements(tensor):
        raise ArgumentError(
            f"{operation}: the result cannot be written to a tensor whose elements share memory (from expand()?); "
            f"pass a .clone()"
        )


def writable(
    tensor: torch.Tensor, operation: str, load: bool = False, apart: bool = False
) -> tuple[torch.Tensor, Finish]:
    """Memory for a result, and what then puts it into the tensor (None: it is the tensor's own).

    Args:
        load: the memory must hold the tensor's elements already.
        apart: never the tensor's own.

    Raises:
        ValueError: several elements lie at one address.
        RuntimeError: a tensor of zeros that torch keeps without memory, as forward-mode AD makes them.
    """
    if not tensor.data_ptr() and torch_internals.is_zero_tensor(tensor):
        raise RuntimeError(f"{operation}: the result cannot be written to an immutable ZeroTensor; pass a .clone()")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and not apart:
        return tensor, None
    check_written(tensor, operation)
    target = tensor.detach()
    buffer = target.resolve_conj().resolve_neg().contiguous() if load else target.new_empty(target.shape)
    if apart and buffer.data_ptr() == target.data_ptr():
        buffer = target.clone()
    return buffer, functools.partial(device.copy, buffer, target)


def all_of(finishes: Sequence[Finish]) -> Finish:
    """One function for several, or None where there is nothing to do."""
    todo = [finish for finish in finishes if finish is not None]
    if not todo:
        return None

    def finish_all() -> None:
        for finish in todo:
            finish()

    return finish_all


#: Addresses and lengths in bytes, one of each per rank; a rank with length 0 is left out.
Blocks = tuple[list[int], list[int]]


def blocks_of(tensors: Sequence[torch.Tensor | None]) -> Blocks:
    """Contiguous tensors, one per rank; None where there is none."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return addresses, [0 if tensor is None else tensor.nbytes for tensor in tensors]


def check_peer(peer: int, size: int, operation: str) -> int:
    """A rank of the group."""
    if not 0 <= peer < size:
        raise ArgumentError(f"{operation}: rank {peer} is not in the group, whose ranks are 0 to {size - 1}")
    return peer


def check_count(found: int, expected: int, what: str, each: str, operation: str) -> None:
    """A list with one entry for each of something."""
    if found != expected:
        raise ArgumentError(f"{operation}: {what} must have {expected} entries, one for each {each}, not {found}")


def check_alike(tensor: torch.Tensor, like: torch.Tensor, operation: str) -> None:
    """Two tensors of one operation."""
    if tensor.dtype != like.dtype:
        raise ArgumentTypeError(f"{operation}: all tensors must have one dtype, not {like.dtype} and {tensor.dtype}")
    if not (tensor.is_cpu and like.is_cpu) and tensor.device != like.device:
        raise ArgumentError(f"{operation}: all tensors must be on one device, not {like.device} and {tensor.device}")


def check_length(tensor: torch.Tensor, expected: int, what: str, operation: str) -> None:
    """One whose number of elements hangs on another's."""
    if tensor.numel() != expected:
        raise ArgumentError(f"{operation}: {what} must have {expected} elements, not {tensor.numel()}")


#: A longer time overflows in torch, and where clocks count nanoseconds.
_LONGEST = timedelta(days=36500)


def check_timeout(doing: str, timeout: timedelta | float) -> timedelta:
    """Refuse a deadline before anybody waits for it; a float is seconds, as for torch's C++.

    Raises:
        TypeError: it is neither.
        ValueError: it has passed already, or is further away than clocks can count.
    """
    if isinstance(timeout, float) and abs(timeout) < _LONGEST.total_seconds():
        timeout = timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta):
        raise ArgumentTypeError(f"{doing}: the timeout must be a datetime.timedelta, not {timeout!r}")
    if timedelta(0) < timeout <= _LONGEST:
        return timeout
    raise ValueError(
        f"{doing}: the timeout must be more than 0 and at most 100 years, not {timeout.total_seconds():g} s. To wait "
        f"for as long as it takes, give timedelta(days=365)"
    )
