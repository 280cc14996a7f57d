"""Tensors on CUDA devices: which stream an operation comes after, and copies that must not race with the user's.

Stream order, the whole of it:

- an operation begins, on the device, after everything that the caller had queued on its current stream. C records an
  event there and lets its own streams wait for it;
- an operation is complete when its last copy is, as seen from this process. So whoever has waited for it, or whose
  callback is run by its future, may use the result on whatever stream;
- tensors and temporary buffers are referred to until then, so the caching allocator, which hands memory to the next
  one on the *same* stream once nobody refers to it, cannot give away what our streams still use. That is what
  ``record_stream`` would be for.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import cuda

from ..names import CUDA_DRIVER, log

if TYPE_CHECKING:
    from .._shim import FFI, Lib

UNKNOWN_ERROR, STREAM_CAPTURED, _RELAXED = 999, 900, 2  # CUDA's own numbers


def is_cuda(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on a device that is driven by CUDA: torch calls those of ROCm by the same name."""
    return tensor.is_cuda and torch.version.hip is None


def types() -> list[str]:
    """The kinds of device whose tensors can be communicated."""
    return ["cpu", "cuda"] if torch.version.cuda is not None else ["cpu"]


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The CUDA devices of some tensors, each once: what a future of them wants to know."""
    return list({tensor.device: None for tensor in tensors if not tensor.is_cpu})


#: C's functions, once they have the driver's.
_loaded: list[Lib] = []


@functools.cache
def _load(lib: Lib, ffi: FFI) -> None:
    message = ffi.new("char[]", 512)
    if lib.mpp_cuda_load(CUDA_DRIVER.encode(), message, 512):
        why = ffi.string(message).decode(errors="replace")
        raise RuntimeError(f"mpiplus cannot use CUDA tensors: {why}. Move them with .cpu()")
    _loaded.append(lib)


def stage(lib: Lib, ffi: FFI, tensor: torch.Tensor, path: int, rank: int, local_rank: int) -> int:
    """Return what C wants for the next operation, whose tensors are on this one's device. C frees it.

    Args:
        path: of C's ``enum mpp_path``: whether MPI is given the device's addresses, or other ranks of the node may be.
        rank: this process, for the words of an error.
        local_rank: its place on its node.

    Raises:
        RuntimeError: no driver, or a stream that is being captured into a graph.
        AcceleratorError: of the driver's.
    """
    _load(lib, ffi)
    device = tensor.device
    _look_for_forgotten_set_device(device, local_rank)
    code = ffi.new("int *")
    handle = lib.mpp_stage(device.index, cuda.current_stream(device).cuda_stream, path, code)
    if handle:
        return int(handle)
    if code[0] == STREAM_CAPTURED:
        raise RuntimeError("mpiplus operations cannot be captured into a CUDA graph: MPI runs on the host")
    error = torch.AcceleratorError(f"mpiplus cannot use {device}: {error_text(lib, ffi, code[0])} on rank {rank}")
    error.error_code = code[0]  # type: ignore[attr-defined]  # which torch's own have
    raise error


def code_of(error: BaseException) -> int:
    """The number of the driver's error, of those that torch and this module raise; 0: there was no memory."""
    return 0 if isinstance(error, torch.OutOfMemoryError) else int(getattr(error, "error_code", None) or UNKNOWN_ERROR)


def error_text(lib: Lib, ffi: FFI, code: int) -> str:
    text = ffi.new("char[]", 512)
    lib.mpp_cuda_error_text(code, text, 512)
    return str(ffi.string(text).decode(errors="replace"))


@functools.cache  # so that each is said once
def _look_for_forgotten_set_device(device: torch.device, local_rank: int) -> None:
    current = cuda.current_device()
    cure = f"Call torch.cuda.set_device({local_rank}) before making CUDA tensors (torchrun's LOCAL_RANK)"
    if device.index != current:
        log.warning("mpiplus: a tensor is on %s while the current device is cuda:%d. %s.", device, current, cure)
    elif device.index == 0 and local_rank > 0 and cuda.device_count() > 1:
        words = "mpiplus: local rank %d uses cuda:0, of %d devices, as local rank 0 probably does. %s."
        log.warning(words, local_rank, cuda.device_count(), cure)


@functools.cache
def _own_stream(device: torch.device) -> Any:
    # Not one of torch's 32, taken in turn: the user's may be the same, and busy while others wait, or captured.
    if handle := _loaded[0].mpp_own_stream(device.index):
        return cuda.ExternalStream(handle, device)
    raise RuntimeError(f"mpiplus cannot have a stream on {device}")


@functools.cache
def _exchange_capture_mode(driver: str) -> Any:
    return ctypes.CDLL(driver).cuThreadExchangeStreamCaptureMode


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[Any]:
    """For what mpiplus itself computes on a device, on any thread, which must not stand behind the user's kernels."""
    exchange, mode = _exchange_capture_mode(CUDA_DRIVER), ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # as mpp_enter_device
    try:
        # A stream alone would set the thread's device back to what it was: a context on cuda:0, for which nobody asked.
        with cuda.device(device), cuda.stream(stream := _own_stream(device)):
            yield stream
    finally:
        exchange(ctypes.byref(mode))


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Put a result in place, on whatever thread; complete when this returns.

    On a device not on the current stream: a thread that completes operations has one of its own, which nothing of the
    user's waits for, and the user's may be busy for long.
    """
    # An inference tensor can be written to in this mode only, and others can be in it too.
    with torch.inference_mode(), nullcontext() if target.is_cpu else on_own_stream(target.device) as stream:
        if target.dim() == 2 and not target.is_contiguous():  # torch cuts a transpose into squares this way round only
            source, target = source.t(), target.t()
        target.copy_(source)
        if stream:
            stream.synchronize()
