"""One process under the launcher, which spawns the ranks itself, as programs do on one node; or starts a program."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from steps import say

SIZE = 2
ALONE = "import torch.distributed as d; d.init_process_group('mpiplus'); print('a world of', d.get_world_size())"


def train(rank: int, how: str, port: str) -> None:
    if how == "variables":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        dist.init_process_group("mpiplus")
    else:
        dist.init_process_group("mpiplus", f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    say(f"rank {rank}: {tensor.item()}")
    dist.destroy_process_group()


def starts_a_program() -> None:
    dist.init_process_group("mpiplus")
    told = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False).stderr
    advice = told[told.index("env=") + 4 :].strip()
    environment = eval(advice, {"os": os})
    subprocess.run([sys.executable, "-c", ALONE], env=environment, check=True)
    say("end")


if __name__ == "__main__":
    if sys.argv[1] == "program":
        starts_a_program()
    else:
        mp.spawn(train, args=tuple(sys.argv[1:]), nprocs=SIZE)
        say("end")
