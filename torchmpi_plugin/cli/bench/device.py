"""Places of a benchmark's tensors: host memory, or a CUDA device, which several ranks may share."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """Makes tensors, and waits for what was begun on them. Tests have others."""

    place: torch.device
    is_shared: bool = False  # whether another rank has its tensors on the same one

    @property
    def kind(self) -> str:
        """As ``--device`` has it."""
        return self.place.type

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return ``count`` zeros."""
        # Written to, not torch.zeros: untouched zeros are one page of the kernel's, always in the cache.
        return torch.empty(count, dtype=dtype, device=self.place).fill_(0)

    def pinned(self, count: int) -> Tensor:
        """Return bytes of host memory that the device reads and writes itself."""
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def new_stream(self) -> AbstractContextManager[object]:
        """Return what work is within that runs beside all else on the device."""
        return torch.cuda.stream(torch.cuda.Stream(self.place))

    def settle(self) -> None:
        """Return when all that was begun is done: a call on tensors of a device may return before."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.place)


CPU = Device(torch.device("cpu"))


def why_not(kind: str) -> str:
    """Say why this process has none of ``kind``, "cpu" or "cuda"; empty if it has one."""
    if kind == "cpu" or torch.cuda.is_available():
        return ""
    built = "" if torch.version.cuda else f": torch {torch.__version__} is built without CUDA"
    return f"--device {kind}: torch sees no CUDA device on {platform.node()}{built}"


def choose(kind: str, comm: MPI.Intracomm, local_rank: int) -> Device:
    """Return the place of this rank's tensors, and make it the current device. For all ranks."""
    if kind == "cpu":
        return CPU
    place = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(place)
    every_rank = comm.allgather(str(torch.cuda.get_device_properties(place).uuid))
    return Device(place, is_shared=len(set(every_rank)) < comm.size)
