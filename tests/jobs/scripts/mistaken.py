"""Programs with common mistakes, for what is said of them."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def shapes() -> None:
    dist.init_process_group("mpiplus")
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def late() -> None:
    """Rank 1 is elsewhere when the others' time is up."""
    dist.init_process_group("mpiplus")
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(2))


def port() -> None:
    """Somebody listens there."""
    taken = socket.create_server(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
    dist.init_process_group("mpiplus")


def module() -> None:
    """mpi4py is not there."""
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    dist.init_process_group("mpiplus")


globals()[sys.argv[1]]()
