"""Backends' names that mean mpiplus, for scripts that name another one and cannot be changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from ..names import BACKEND

_FUNCTIONS = ("init_process_group", "new_group")


def replace(names: Collection[str]) -> None:
    """Have ``init_process_group`` and ``new_group`` make groups of mpiplus where they are asked for one of these.

    Args:
        names: of backends; ``default``: no name at all, which in ``new_group`` is the world's anyway.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    for function in _FUNCTIONS:
        original = getattr(distributed_c10d, function)
        replacement = _replacing(original, names)
        for module in (dist, distributed_c10d, device_mesh):
            if getattr(module, function, None) is original:
                setattr(module, function, replacement)


def meant(backend: str | None, names: Collection[str]) -> str | None:
    """What a name means: ``gloo``, ``cpu:gloo,cuda:nccl``, or None."""
    if backend is None:
        return BACKEND if "default" in names else None
    parts = [part.rpartition(":") for part in str(backend).split(",")]
    return ",".join(device + colon + (BACKEND if name.lower() in names else name) for device, colon, name in parts)


def _replacing(original: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    makes_the_world = original.__name__ == "init_process_group"

    @functools.wraps(original)
    def replacing(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)  # a wrong argument is the caller's, with torch's own words
        backend = given.arguments.get("backend")
        if backend is not None or makes_the_world:
            given.arguments["backend"] = meant(backend, names)
        return original(*given.args, **given.kwargs)

    return replacing
