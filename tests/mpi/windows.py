"""What the tests of windows share: a window of a kind, and how ranks write to each other in it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from torchmpi_plugin import settings, torch_internals

HAS_WINDOWS = torch_internals.version() >= (2, 15)
WHY_NOT = f"torch {torch.__version__} has no windows: they come with 2.15"
SHARES = not settings.unshared()
#: Memory that the other ranks of the node can map, and memory that only messages reach.
KINDS = ("mapped", "messages")


def memory(group: Any, kind: str, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of zeros."""
    if kind == "mapped":
        return group.allocate_tensor(numel, dtype=dtype, device="cpu")
    return torch.zeros(numel * dtype.itemsize, dtype=torch.uint8).view(dtype)


def options(kind: str, seconds: float) -> Any:
    """PutOptions, SignalOptions or WaitSignalOptions with a timeout."""
    made = getattr(torch._C._distributed_c10d, kind)()
    made.timeout = timedelta(seconds=seconds)
    return made


def meet(window: Any, group: Any) -> None:
    """What all ranks have put so far is there when this returns."""
    for rank in range(group.size()):
        window.signal(rank, False)
    for rank in range(group.size()):
        window.wait_signal(rank, False)
