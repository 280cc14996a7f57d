"""Backends' names that mean mpiplus, for scripts that name another one and cannot be changed."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from ..launchers.variables import rank_above
from ..names import BACKEND

_FUNCTIONS = ("init_process_group", "new_group")


def replace(names: Collection[str]) -> None:
    """Have ``init_process_group`` and ``new_group`` make groups of mpiplus where they are asked for one of these.

    Args:
        names: of backends; ``default``: no name at all, which in ``new_group`` is the world's anyway.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    makers: dict[str, Any] = {function: functools.partial(_replacing, names=names) for function in _FUNCTIONS}
    if "gloo" in names:
        makers["monitored_barrier"] = _monitored
    for function, make in makers.items():
        original = getattr(distributed_c10d, function)
        replacement = make(original)
        for module in (dist, distributed_c10d, device_mesh):
            if getattr(module, function, None) is original:
                setattr(module, function, replacement)
    # What a program asks before it names a backend, and after. torch itself goes on asking its own functions.
    for name in names:
        if hasattr(dist, f"is_{name}_available"):
            setattr(dist, f"is_{name}_available", lambda: True)
    available, get_backend = dist.is_backend_available, dist.get_backend

    def get_name(group: Any = None) -> str:
        present = get_backend(group)
        return _ours(group).known_as if present == BACKEND else present

    dist.is_backend_available = lambda backend: available(meant(backend, names) or backend)
    dist.get_backend = functools.wraps(get_backend)(get_name)  # type: ignore[assignment]


def _ours(group: Any) -> Any:
    """The group of mpiplus's behind one of the program's, the world if None; None: another backend carries it out."""
    import torch.distributed as dist

    from ..api.backend import group_of

    return group_of(dist.group.WORLD if group is None else group)


def meant(backend: str | None, names: Collection[str]) -> str | None:
    """Parse a name: ``gloo``, ``cpu:gloo,cuda:nccl``, or None."""
    if backend is None:
        return BACKEND if "default" in names else None
    parts = [part.rpartition(":") for part in str(backend).split(",")]
    return ",".join(device + colon + (BACKEND if name.lower() in names else name) for device, colon, name in parts)


def _in_a_ranks_child() -> bool:
    """As torch's checkpoints start one, for gloo; not while it imports the rank's own script."""
    return rank_above() is not None and not getattr(multiprocessing.current_process(), "_inheriting", False)


def _replacing(original: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    from torch.distributed import distributed_c10d

    signature = inspect.signature(original)
    makes_the_world = original.__name__ == "init_process_group"

    @functools.wraps(original)
    def replacing(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)  # a wrong argument is the caller's, with torch's own words
        backend = given.arguments.get("backend")
        asked = str(backend or "").lower()
        if (backend is not None or makes_the_world) and not _in_a_ranks_child():  # which cannot take part in MPI
            given.arguments["backend"] = backend = meant(backend, names)
        options: Any = given.arguments.get("pg_options")
        of_world = distributed_c10d.get_backend() if distributed_c10d.is_initialized() else ""
        if (backend or of_world) == BACKEND and hasattr(options, "_timeout"):  # mpiplus's own have none
            # All that means something to mpiplus of the options of the backend that was asked for.
            given.arguments.setdefault("timeout", options._timeout)
            del given.arguments["pg_options"]
        made = original(*given.args, **given.kwargs)
        # Not else: a program of torch's own backends needs no MPI.
        if (backend or of_world) == BACKEND and (ours := _ours(None if makes_the_world else made)):
            ours.known_as = asked or _ours(None).known_as
        return made

    return replacing


def _monitored(original: Callable[..., None]) -> Callable[..., None]:
    """torch's ``monitored_barrier`` looks for gloo by name."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        base: Any = dist.ProcessGroup  # the stubs do not know its method
        found: Any = dist.group.WORLD if group is None else group
        if isinstance(found, base) and type(found).monitored_barrier is not base.monitored_barrier:
            timeout = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
            found.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    return monitored_barrier
