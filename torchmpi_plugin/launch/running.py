"""The configuration that a distributed function is started with: a rank is initialised as it says, and runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..dist import members, queries
from ..dist.starting import initialize_dist
from ..launchers import variables as launchers
from ..names import log
from .parallel import init_parallelism

P = ParamSpec("P")
T = TypeVar("T")

_BACKEND, _METHOD = "TORCH_DISTRIBUTED_BACKEND", "INIT_METHOD"
_MISSING: tuple[object, ...] = (None, "", "???")  # what the user has left open; the last is omegaconf's MISSING


def job_size() -> int | None:
    """Return how many ranks the job has that this process is part of; None where nobody has launched it."""
    if members.initialized() and dist.get_world_size() > 1:
        return dist.get_world_size()
    here = members.launched()
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
            self.local_world_size = members.launched().local_size if size else self.world_size
        if self.master_port in _MISSING:
            self.master_port = None
            if self.init_method == "env://":
                self.init_method = "mpi://"


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
    return dist.Backend(os.environ.get(_BACKEND) or default_backend())


def set_distributed_backend(backend: str) -> None:
    """Set TORCH_DISTRIBUTED_BACKEND, for this process and those it starts. From ml.

    Example::

        set_distributed_backend("gloo")
    """
    os.environ[_BACKEND] = backend


def init_process_group_from_backend(backend: str | dist.Backend | None = None) -> None:
    """Initialise the default group, use this rank's GPU if there is one, and try an all_reduce. From ml.

    Args:
        backend: the variable TORCH_DISTRIBUTED_BACKEND, or mpiplus, if None.

    Without ``init_dist`` before it, rank and size are MPI's.

    Example::

        init_process_group_from_backend("gloo")
    """
    name = str(get_distributed_backend() if backend is None else backend)
    method = os.environ.get(_METHOD, "mpi://")
    if method == "mpi://":
        initialize_dist(timeout=default_pg_timeout, backend=name)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(name, init_method=method, world_size=size, rank=rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(queries.get_local_rank() % torch.cuda.device_count())
    world = members.find(None, "init_process_group_from_backend")
    dist.all_reduce(torch.zeros(1, device=world.device))
    log.info("rank %d of %d is up on %s", world.rank, world.size, name)


def init_dist(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int | None,
    init_method: str,
    backend: str | dist.Backend | None = None,
) -> None:
    """Set torchrun's variables, and INIT_METHOD, and initialise the default group. From ml.

    Args:
        rank: of this process.
        local_rank: among the ranks on its node.
        world_size: how many ranks there are.
        local_world_size: how many of them on its node.
        master_addr: where rank 0 listens, for ``env://``.
        master_port: the same.
        init_method: ``env://``, ``mpi://`` (which wants no address), ``tcp://...`` or ``file://...``.
        backend: as for :func:`init_process_group_from_backend`.

    Example::

        init_dist(0, 0, 1, 1, "127.0.0.1", 29500, "env://", backend="gloo")
    """
    os.environ[_METHOD] = init_method
    if init_method != "mpi://":
        values = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": local_world_size,
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": master_port,
        }
        os.environ.update({name: str(value) for name, value in values.items() if value is not None})
    init_process_group_from_backend(backend)


def _method(cfg: MultiprocessConfig, here: members.Launched) -> str:
    """As configured; but the default address leads each node to itself, and is no meeting place for several."""
    one_node = here.local_size in (None, here.size)
    if one_node or cfg.init_method != "env://" or not cfg.master_addr.startswith(("127.", "localhost")):
        return cfg.init_method
    log.warning("master_addr is %s, and the ranks are on several nodes: they meet through MPI", cfg.master_addr)
    return "mpi://"


def _bring_up(cfg: MultiprocessConfig) -> None:
    cfg.resolve()
    here = members.launched()
    if not members.initialized():
        init_dist(
            rank=here.rank if cfg.rank < 0 else cfg.rank,
            local_rank=(here.local_rank or 0) if cfg.local_rank < 0 else cfg.local_rank,
            world_size=cfg.world_size or 1,
            local_world_size=cfg.local_world_size or 1,
            master_addr=cfg.master_addr,
            master_port=cfg.master_port,
            init_method=_method(cfg, here),
            backend=cfg.backend,
        )
    cfg.rank, cfg.world_size = queries.get_global_rank(), queries.get_world_size()
    cfg.local_rank, cfg.local_world_size = queries.get_local_rank(), queries.get_local_world_size()


def init_and_run(func: Callable[P, T], cfg: MultiprocessConfig, *args: P.args, **kwargs: P.kwargs) -> T:
    """On each rank: initialise the world and the parallel groups as ``cfg`` says, and call ``func``. From ml.

    Where ``rank`` is left open in ``cfg`` it is MPI's. A world that exists already is used as it is. Afterwards
    ``cfg`` has what came of it.

    Returns:
        What ``func`` returns (ml: None).

    Example::

        accuracy = init_and_run(train, MultiprocessConfig(), epochs=10)  # under mpirun
    """
    _bring_up(cfg)
    init_parallelism(
        model_parallelism=cfg.model_parallelism,
        pipeline_parallelism=cfg.pipeline_parallelism,
        mp_backend=cfg.model_parallel_backend or cfg.backend,
        pp_backend=cfg.pipeline_parallel_backend or cfg.backend,
        dp_backend=cfg.data_parallel_backend or cfg.backend,
    )
    return func(*args, **kwargs)
