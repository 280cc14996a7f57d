"""Rank 1 has no room for the record of its calls."""

import errno
import os

import torch
import torch.distributed as dist


def refuse(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if os.environ["RANK"] == "1":
    os.posix_fallocate = refuse
dist.init_process_group("mpiplus")
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
