"""The backend that is meant where nobody names one."""

from __future__ import annotations

import os

import torch.distributed as dist

VARIABLE = "TORCH_DISTRIBUTED_BACKEND"


def default_backend() -> str:
    """``"mpiplus"``. From ml, where it is nccl on GPUs and gloo elsewhere.

    Example::

        assert default_backend() == "mpiplus"
    """
    return "mpiplus"


def get_distributed_backend() -> dist.Backend:
    """The variable TORCH_DISTRIBUTED_BACKEND, or the default. From ml.

    Example::

        torch.distributed.init_process_group(get_distributed_backend())
    """
    return dist.Backend(os.environ.get(VARIABLE) or default_backend())


def set_distributed_backend(backend: str) -> None:
    """Set TORCH_DISTRIBUTED_BACKEND, for this process and those it starts. From ml.

    Example::

        set_distributed_backend("gloo")
    """
    os.environ[VARIABLE] = backend
