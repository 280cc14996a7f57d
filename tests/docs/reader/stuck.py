"""A reader's program that hangs for a while, and can tell where."""

import faulthandler
import signal
import time
from pathlib import Path

import torch.distributed as dist

faulthandler.register(signal.SIGUSR1, all_threads=True)
dist.init_process_group("mpiplus")
Path(f"ready.{dist.get_rank()}").touch()
if dist.get_rank() == 1:
    time.sleep(4)
dist.barrier()
dist.destroy_process_group()
