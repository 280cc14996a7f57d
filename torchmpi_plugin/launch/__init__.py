"""Functions started on several ranks, as ml does it.

Names and arguments of ``ml.utils.torch_distributed``, over MPI.

From a plain Python process :func:`launch_subprocesses` starts the ranks through mpirun; in a program that mpirun
has started it calls the function in place::

    def train(epochs: int) -> None:
        print(parallel_group_info().dp.rank, epochs)

    if __name__ == "__main__":
        launch_subprocesses(train, MultiprocessConfig(world_size=4, model_parallelism=2), None, 0, 10)

What differs from ml is in ``docs/migrating-from-ml.md``.

Uses ``jobs`` and ``dist``. Start with ``processes.py``.
"""

from __future__ import annotations

from ..dist.tensors import all_to_all
from ..errors import RankFailedError
from .parallel import (
    GroupInfo,
    ParallelGroups,
    init_parallelism,
    parallel_group_info,
    parallelism_is_initialized,
    reset_parallelism,
)
from .processes import launch_subprocess, launch_subprocesses
from .running import (
    MultiprocessConfig,
    default_backend,
    get_distributed_backend,
    init_and_run,
    init_dist,
    init_process_group_from_backend,
    set_distributed_backend,
)

__all__ = [
    "GroupInfo",
    "MultiprocessConfig",
    "ParallelGroups",
    "RankFailedError",
    "all_to_all",
    "default_backend",
    "get_distributed_backend",
    "init_and_run",
    "init_dist",
    "init_parallelism",
    "init_process_group_from_backend",
    "launch_subprocess",
    "launch_subprocesses",
    "parallel_group_info",
    "parallelism_is_initialized",
    "reset_parallelism",
    "set_distributed_backend",
]
