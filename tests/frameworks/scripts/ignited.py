"""ignite started by name, or over a group that is there already; whether auto_model makes the ranks train together."""

import sys

import ignite.distributed as idist
import torch
import torch.distributed as dist


def training(local_rank: int) -> None:
    model = idist.auto_model(torch.nn.Linear(2, 2))
    kind = type(model).__name__
    sys.stdout.write(f"<{idist.get_rank()} of {idist.get_world_size()} on {idist.backend()}> {kind}\n")


if "first" in sys.argv:
    dist.init_process_group("mpiplus")
    training(idist.get_local_rank())
else:
    with idist.Parallel(backend="mpiplus") as parallel:
        parallel.run(training)
