"""Programs as users of other backends bring them along, for `mpiplus run`."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _sum() -> list[float]:
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


def meets(backend: str) -> None:
    """By env://, of which torch needs all four variables."""
    assert dist.is_backend_available(backend)
    dist.init_process_group(backend, init_method="env://")
    assert dist.get_backend() == backend
    if backend == "gloo":  # or what MPIPLUS_REPLACE has put in its place
        dist.monitored_barrier(timeout=timedelta(seconds=30))
    print("sum", dist.group.WORLD.name(), _sum(), "port", os.environ["MASTER_PORT"])
    gloo: Any = dist.ProcessGroupGloo  # the stubs do not know its options
    options = {"pg_options": gloo._Options()} if backend == "gloo" else {}
    with torch.autograd.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    assert f"{backend}:all_reduce" in [event.name for event in profiler.function_events or ()]
    subgroup = dist.new_group([0, 1], backend="gloo", **options)
    dist.all_reduce(torch.ones(1), group=subgroup)  # gloo is sure to be connected then
    print("subgroup", subgroup.name(), dist.get_backend(subgroup))
    dist.destroy_process_group()


def clients() -> None:
    """A store at the exported address, also for who means to serve one there, time and again."""
    from mpi4py import MPI
    from torch.distributed import rpc

    dist.init_process_group("mpiplus")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {each}" for each in range(size)])
    dist.destroy_process_group()
    for backend in ("gloo", "gloo", "mpiplus", "gloo"):
        MPI.COMM_WORLD.Barrier()  # or who is early meets the keys of the world before, with gloo alone as well
        dist.init_process_group(backend)
        print(backend, _sum())
        dist.destroy_process_group()
    dist.init_process_group("mpiplus")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2
    rpc.shutdown()
    dist.destroy_process_group()


def checkpoints() -> None:
    """By a process of torch's, which meets the others' at the exported address."""
    from torch.distributed.checkpoint import state_dict_saver

    dist.init_process_group("mpiplus")
    kind = state_dict_saver.AsyncCheckpointerType.PROCESS
    saved = state_dict_saver.async_save({"x": torch.ones(4)}, checkpoint_id="saved", async_checkpointer_type=kind)
    assert not isinstance(saved, state_dict_saver.AsyncSaveResponse)
    saved.result(timeout=60)
    print("saved", Path("saved", ".metadata").exists())
    dist.destroy_process_group()


def in_slurm() -> None:
    print("slurm", *(os.environ.get(f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NODEID")))


def interrupted() -> None:
    dist.init_process_group("mpiplus")
    _sum()
    print("ready", file=sys.stderr)
    Path(f"ready-{dist.get_rank()}").touch()
    while True:
        _sum()
        time.sleep(0.01)


def crashes() -> None:
    dist.init_process_group("mpiplus")
    _sum()
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    _sum()


def defaults() -> None:
    """A script that reads torchrun's variables, and takes itself for alone without them."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("mpiplus", rank=int(os.environ.get("RANK", "0")), world_size=size)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
