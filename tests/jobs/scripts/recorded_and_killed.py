"""Rank 1 is killed while the others wait for it."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

dist.init_process_group("mpiplus")
for _ in range(50):
    dist.all_reduce(torch.ones(10))
dist.barrier()  # all have all of these
if dist.get_rank() == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
