"""Waits in an all_reduce for ranks whose node has been unplugged, and writes down what it is told."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

directory = Path(sys.argv[1])
dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
rank = dist.get_rank()
group = dist.new_group(timeout=timedelta(seconds=5))
dist.all_reduce(torch.ones(3), group=group)
(directory / f"ready-{rank}").touch()
while not (directory / "cut").exists():  # else some ranks may be an operation ahead when the cable is pulled
    time.sleep(0.05)
try:
    while True:
        dist.all_reduce(torch.ones(3), group=group)
        time.sleep(0.1)
except dist.DistBackendError as error:
    (directory / f"part-{rank}").write_text(str(error))
    (directory / f"part-{rank}").rename(directory / f"error-{rank}")
# A launcher kills the ranks it still reaches as soon as one has ended: nobody goes before all have been told.
until = time.monotonic() + 60
while len(list(directory.glob("error-*"))) < dist.get_world_size() and time.monotonic() < until:
    time.sleep(0.05)
os._exit(1)  # MPI cannot end in order
