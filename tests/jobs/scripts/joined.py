"""Worlds of processes that MPI's launcher did not start; and a rank that starts a program."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing
from steps import ME, SIZE, check_works, raises, run

import torchmpi_plugin

PATIENCE = timedelta(seconds=60)
ALONE = "import torch.distributed as d; d.init_process_group('mpiplus'); print('a world of', d.get_world_size())"


def trains() -> None:
    """Under torchrun: MPI has the ranks that torchrun gave, and nothing of it is left to child processes."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for _ in range(2):
        dist.init_process_group("mpiplus", timeout=PATIENCE)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        check_works()
        check_works(dist.new_group())
        comm = torchmpi_plugin.get_comm()
        assert (comm.rank, comm.size) == (rank, size)
        dist.destroy_process_group()
    from mpi4py import MPI

    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, size)
    assert not [name for name in os.environ if name.startswith("PMI_")]


def spawned(url: str, size: str) -> None:
    """Processes made by torch.multiprocessing, as PyTorch's own tests do it."""
    torch.multiprocessing.spawn(member, args=(int(size), url), nprocs=int(size))


def parent(url: str, how: str) -> None:
    """Rank 1 starts rank 0, and waits for its end before its own."""
    other = torch.multiprocessing.start_processes(member, (2, url), nprocs=1, join=False, start_method=how)
    member(1, 2, url)
    assert other.join(PATIENCE.seconds)


def member(rank: int, size: int, url: str) -> None:
    """By the URL, or if it is a port by variables."""
    if url.isdigit():
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=url)
        dist.init_process_group("mpiplus", timeout=PATIENCE)
    else:
        dist.init_process_group("mpiplus", init_method=url, rank=rank, world_size=size, timeout=PATIENCE)
    check_works()
    dist.destroy_process_group()
    os.write(1, f"member {rank} of {size} is done\n".encode())


def program() -> None:
    """It is told what to leave out of its environment, and that works."""
    dist.init_process_group("mpiplus")
    told = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False).stderr
    environment = eval(told[told.index("env=") + 4 :].strip(), {"os": os})
    subprocess.run([sys.executable, "-c", ALONE], env=environment, check=True)


def absent() -> None:
    """The last rank has come to the store, and then does not come to the world."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, False)
    store.set(f"here {ME}", "")
    store.wait([f"here {rank}" for rank in range(SIZE)])  # only the last one may be missing below, not a slow one
    if ME == SIZE - 1:
        store.wait(["others gave up"])
        return
    with raises(dist.DistBackendError, "MPI did not start", rf"rank {SIZE - 1} did not come"):
        dist.init_process_group("mpiplus", store=store, rank=ME, world_size=SIZE, timeout=timedelta(seconds=3))
    if store.add("gave up", 1) == SIZE - 1:
        store.set("others gave up", "")


if __name__ == "__main__":
    run(globals())
