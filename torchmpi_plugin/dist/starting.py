"""Bring up the default group, however this process was started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..launchers import variables as launchers
from ..names import log
from . import members
from .queries import get_local_rank

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GPU, _CPU = ("gpu", "cuda"), ("cpu",)


def _wants_gpu(device: Any) -> tuple[bool, int | None]:
    """Return the kind and GPU's number, if any, of a name, a torch.device or one of Composer's Device objects."""
    kind, _, number = str(getattr(device, "name", None) or device).lower().partition(":")
    if kind in _GPU and (number.isdigit() or not number):
        return True, int(number) if number else None
    if device is None or kind in _CPU:
        return False, None
    raise ValueError(f"device must be one of {', '.join(_CPU + _GPU)} or None, not {device!r}")


def _how_to_meet(backend: str) -> dict[str, Any]:
    """Arguments of ``init_process_group``. mpiplus finds MPI by itself, other backends are helped."""
    is_described = all(os.environ.get(name) for name in _RENDEZVOUS)
    if backend == "mpiplus" and not is_described:
        return {}
    here = members.launched()
    if is_described:
        described = os.environ["WORLD_SIZE"]
        if here.size == 1 or described == str(here.size):
            return {}
        # Left over from something else: N jobs would start, and nobody would notice.
        log.warning("MPI has started %d processes; RANK and WORLD_SIZE=%s are not used", here.size, described)
        return {"init_method": "mpi://"}
    if here.size == 1:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    by_mpi = members.running_mpi() is not None or launchers.started_by_mpi()  # rather than by torchrun
    return {"init_method": "mpi://"} if by_mpi else {}


def initialize_dist(device: Any = None, timeout: float | timedelta = 300.0, backend: str = "mpiplus") -> None:
    """Initialise the default group; calling it again does nothing.

    Rank and size come from MPI, or from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where all of them are
    set and MPI has not started another number of processes. A process that nobody launched is a world of one,
    with no variable set. From Composer, where the device chooses the backend and mpirun is not noticed.

    Args:
        device: "gpu" or "cuda": use the GPU that has the local rank's number; "cuda:1": that one. "cpu" or None:
            nothing. torch.device and Composer's Device objects do too.
        timeout: deadline of the group's operations, in seconds or as a timedelta.
        backend: torch's name of the backend; "gloo" and "nccl" find MPI's ranks as well.

    Raises:
        RuntimeError: a group with another backend exists already, or there is no GPU.
        ValueError: another device.

    Example::

        initialize_dist("gpu" if torch.cuda.is_available() else "cpu", backend="mpiplus")
    """
    (gpu, number), backend = _wants_gpu(device), str(backend).lower()
    if gpu and not torch.cuda.is_available():
        raise RuntimeError(f"initialize_dist: device is {device!r}, but torch sees no GPU")
    if members.initialized():
        present = dist.get_backend()
        if present != backend:
            raise RuntimeError(
                f"initialize_dist: the process group has the backend {present!r}, not {backend!r}; call "
                f"torch.distributed.destroy_process_group() before another one is made"
            )
    else:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        dist.init_process_group(backend, timeout=limit, **_how_to_meet(backend))
        get_local_rank()  # where backend and launcher do not tell, it takes all ranks; they are here now
    if gpu:
        torch.cuda.set_device(get_local_rank() % torch.cuda.device_count() if number is None else number)
