"""A reader's program of which one rank comes too late to a collective."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("mpiplus", timeout=timedelta(seconds=3))
if dist.get_rank() == 1:
    time.sleep(6)
dist.all_reduce(torch.ones(3))
