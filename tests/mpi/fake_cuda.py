"""CUDA tensors without a GPU: tensors in the memory of tests/cuda_driver, a stand-in for the driver's library.

A :class:`DeviceTensor` says of itself that it is on ``cuda:0``. It lies in memory that the stand-in's streams copy from
and to; its bytes come into being when a slow kernel on the current stream has run. The program could read it all the
time, as it could not on a GPU, so it must not be read before an operation is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cases import Case

SOURCES = Path(__file__).resolve().parents[1] / "cuda_driver"
JUNK = 0xA5
STAGE_BYTES = 1 << 16  # one chunk of shared memory, so that a large tensor takes many pieces


def build(directory: Path) -> Path:
    """Compile the stand-in, unless MPIPLUS_TEST_CUDA_DRIVER names one."""
    if ready := os.environ.get("MPIPLUS_TEST_CUDA_DRIVER"):
        return Path(ready)
    library = directory / "libfakecuda.so"
    sources = sorted(map(str, SOURCES.glob("*.c")))
    flags = ["-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden"]
    subprocess.run(["gcc", *flags, "-o", str(library), *sources, "-lpthread"], check=True, timeout=120)
    return library


class Driver:
    """The stand-in, loaded into this process."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.lib = ctypes.CDLL(str(library))
        self.lib.fake_alloc.restype = self.lib.fake_stream.restype = self.lib.fake_view.restype = ctypes.c_void_p
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.lib.fake_kernel.argtypes = [pointer, ctypes.c_int, ctypes.c_uint, pointer, pointer, size]
        self.lib.fake_alloc.argtypes = [ctypes.c_int, size, ctypes.c_int]
        for name in ("free", "view", "drain", "stream_destroy", "stream_capture", "synchronize"):
            getattr(self.lib, f"fake_{name}").argtypes = [pointer]
        self.lib.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self.allocated: list[int] = []
        self.stream: int = 0
        self.kernel_us = 0
        #: .stream: what `with torch.cuda.stream(...)` has chosen in this thread.
        self.chosen = threading.local()

    def violations(self) -> list[str]:
        """What the stand-in has seen and a driver does not allow; empties the list."""
        text = ctypes.create_string_buffer(256)
        count = self.lib.fake_violations(text, 256)
        return [f"{count} violations, the first: {text.value.decode()}"] if count else []

    def calls(self) -> dict[str, int]:
        """How often each of the driver's functions was called since the last time."""
        text = ctypes.create_string_buffer(1024)
        self.lib.fake_calls(text, len(text))
        words = text.value.decode().split()
        return dict(zip(words[::2], map(int, words[1::2]), strict=True))

    def memory(self, size: int, device: int = 0) -> torch.Tensor:
        """Bytes on a device, which hold junk."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        address = self.lib.fake_alloc(device, size, 1)
        self.allocated.append(address)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8).fill_(JUNK)

    def current_stream(self) -> int:
        return getattr(self.chosen, "stream", self.stream)

    def write_later(self, address: int, data: torch.Tensor, device: int = 0) -> None:
        """Queue a kernel on the current stream that writes these bytes."""
        size = data.numel()
        self.lib.fake_kernel(self.current_stream(), device, self.kernel_us, address, data.data_ptr(), size)

    def drain(self) -> None:
        """Wait for the current stream."""
        self.lib.fake_drain(self.stream)

    def recover(self) -> None:
        """No more calls fail, and copies whose end could not be asked for are through: CUDA would have stopped them."""
        self.lib.fake_fail(None, 0, 0)
        self.lib.fake_drain_all()

    def free(self, tensor: torch.Tensor) -> None:
        self.allocated.remove(tensor.data_ptr())
        self.lib.fake_free(tensor.data_ptr())

    def free_all(self) -> None:
        for address in self.allocated:
            self.lib.fake_free(address)
        self.allocated.clear()

    @contextlib.contextmanager
    def on_stream(self, kernel_us: int, device: int = 0) -> Iterator[None]:
        """Work on a stream of the user's own, with kernels that take so long."""
        before = self.stream, self.kernel_us
        self.stream, self.kernel_us = self.lib.fake_stream(device), kernel_us
        try:
            yield
        finally:
            self.drain()
            self.lib.fake_stream_destroy(self.stream)
            self.stream, self.kernel_us = before

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Another thread captures a graph, as torch does: what is unsafe then is refused everywhere, and told."""
        self.lib.fake_capture(1)
        try:
            yield
        finally:
            self.lib.fake_capture(0)


class DeviceTensor(torch.Tensor):
    """A tensor in the stand-in's memory."""

    driver: Driver
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    # The front end of torch.distributed switches __torch_function__ off for what it calls, so what mpiplus asks of a
    # tensor must be methods.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def _there(self, result: torch.Tensor) -> DeviceTensor:
        if not result.numel() or self.driver.lib.fake_view(result.data_ptr()):
            return result.as_subclass(DeviceTensor)
        return on_device(self.driver, result, at_once=True)

    def detach(self) -> DeviceTensor:
        return self._there(super().detach())

    def new_empty(self, *arguments: Any, **named: Any) -> DeviceTensor:
        made = super().new_empty(*arguments, **named)
        return self._there(made) if "dtype" not in named else made  # type: ignore[return-value]  # kernels' alone

    def contiguous(self) -> DeviceTensor:
        self.driver.drain()  # runs on the device when it gets there
        return self._there(super().contiguous())

    def view(self, *arguments: Any) -> DeviceTensor:
        return self._there(super().view(*arguments))

    def __getitem__(self, index: Any) -> DeviceTensor:
        return self._there(super().__getitem__(index))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        if self.is_contiguous() and self.numel() and hasattr(self.driver.chosen, "stream"):
            values = source.to(self.dtype).contiguous().flatten().view(torch.uint8)
            self.driver.write_later(self.data_ptr(), values)
        else:
            self.driver.drain()
            super().copy_(source)
        return self


def on_device(driver: Driver, tensor: torch.Tensor, at_once: bool = False) -> DeviceTensor:
    """A copy on the device with the same strides, which comes into being on the current stream."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory = driver.memory(storage.numel())
    if at_once:
        memory.copy_(storage)
    elif storage.numel():
        driver.write_later(memory.data_ptr(), storage)
    there = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return there.as_subclass(DeviceTensor)


class DeviceCase(Case):
    """A case whose tensors come into being on the device, when that has got there."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return on_device(DeviceTensor.driver, super().place(tensor))

    def empty(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        return on_device(DeviceTensor.driver, super().empty(shape))


def torch_cuda(driver: Driver) -> SimpleNamespace:
    """What torchmpi_plugin.tensors.device uses of torch.cuda."""

    class Stream:
        def __init__(self, handle: int, device: torch.device) -> None:
            self.cuda_stream, self.device = handle, device

        def synchronize(self) -> None:
            driver.lib.fake_synchronize(self.cuda_stream)

    @contextlib.contextmanager
    def device(where: torch.device) -> Iterator[None]:
        driver.chosen.device = where
        try:
            yield
        finally:
            del driver.chosen.device

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        # torch sets the thread's device back behind it, for which that gets a context if it had none.
        assert driver.chosen.device == stream.device, "a context is made on a device that nobody uses"
        driver.chosen.stream = stream.cuda_stream
        try:
            yield
        finally:
            del driver.chosen.stream

    return SimpleNamespace(
        current_stream=lambda device: Stream(driver.current_stream(), device),
        current_device=lambda: 0,
        device=device,
        device_count=lambda: 1,
        stream=on,
        ExternalStream=Stream,  # no other: those of torch's pool may be the user's
    )


@functools.cache
def driver_in(directory: Path) -> Driver:
    return Driver(build(directory))


@contextlib.contextmanager
def cuda_without_gpu(directory: Path) -> Iterator[Driver]:
    """Let mpiplus take DeviceTensors, over the stand-in."""
    from torchmpi_plugin.group import device_reductions
    from torchmpi_plugin.mpi import runtime
    from torchmpi_plugin.tensors import device

    driver = DeviceTensor.driver = driver_in(directory)
    before = device.cuda, device.CUDA_DRIVER, device.devices_of, torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda _: (9, 0)  # which the front end of broadcast asks for
    device.cuda, device.CUDA_DRIVER = torch_cuda(driver), str(driver.path)
    real, device_reductions.cuda = device_reductions.cuda, device.cuda
    device.devices_of = lambda tensors: []  # this torch makes no future for devices that it does not know
    device._load(*runtime.shim())
    try:
        yield driver
    finally:
        device.cuda, device.CUDA_DRIVER, device.devices_of, torch.cuda.get_device_capability = before
        device_reductions.cuda = real
        driver.free_all()
