"""Settings that a distributed function is started with."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..dist import before_init
from ..dist.members import initialized
from ..launchers import variables as launchers

_MISSING: tuple[object, ...] = (None, "", "???")  # what the user has left open; the last is omegaconf's MISSING


def job_size() -> int | None:
    """Return how many ranks the job has that this process is part of; None where nobody has launched it."""
    if initialized() and dist.get_world_size() > 1:
        return dist.get_world_size()
    here = before_init.find()
    alone = here.size == 1 and not launchers.started_by_mpi() and "TORCHELASTIC_RUN_ID" not in os.environ
    return None if alone else here.size


@dataclass
class MultiprocessConfig:
    """ml's configuration, with its fields and defaults. What is left open is filled in by :meth:`resolve`.

    Attributes:
        rank, local_rank: of this process; set by the helpers, -1 before.
        world_size: the number of ranks; MPI's if the program was started by it, else the number of GPUs, or 1.
        local_world_size: ranks on this node.
        master_addr, master_port: where the ranks meet with ``env://``. They meet through MPI without a port, and on
            several nodes with an address that leads each node to itself, which the default is.
        init_method: ``env://``, ``mpi://``, ``tcp://host:port`` or ``file:///path``.
        model_parallelism: ranks that share one layer.
        pipeline_parallelism: ranks that share one model by layers. What is left is data parallel.
        backend: of the world; None: :func:`get_distributed_backend`.
        model_parallel_backend, pipeline_parallel_backend, data_parallel_backend: of the groups; None: ``backend``.
        launch_method: ml's way to start processes. Not used: MPI starts them.

    Example::

        config = MultiprocessConfig(world_size=8, model_parallelism=2, data_parallel_backend="gloo")
    """

    rank: int = -1
    local_rank: int = -1
    world_size: int | None = None
    local_world_size: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    init_method: str = "env://"
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: str | None = None
    model_parallel_backend: str | None = None
    pipeline_parallel_backend: str | None = None
    data_parallel_backend: str | None = None
    launch_method: str = "forkserver"

    def resolve(self) -> None:
        """Fill in what is left open; initialises nothing. ml's ``MultiprocessConfig.resolve(cfg)`` works too.

        Raises:
            ValueError: the program runs under a launcher that started another number of ranks.
        """
        size = job_size()
        if self.world_size in _MISSING:
            self.world_size = size or max(torch.cuda.device_count(), 1)
        elif size not in (None, self.world_size):
            raise ValueError(
                f"MultiprocessConfig: world_size is {self.world_size}, but this program is one of {size} ranks that "
                f"its launcher started; leave world_size out, or start it without a launcher"
            )
        if self.local_world_size in _MISSING:
            self.local_world_size = before_init.find().local_size if size else self.world_size
        if self.master_port in _MISSING:
            self.master_port = None
            if self.init_method == "env://":
                self.init_method = "mpi://"
