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
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() != 1:
    store.add("others wait", 1)
else:
    while store.add("others wait", 0) < dist.get_world_size() - 1:
        time.sleep(0.01)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
