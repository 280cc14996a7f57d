"""Programs that `mpiplus status` looks at: rank 1 is somewhere, the others wait for it in an all_reduce."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def sleeps() -> None:
    time.sleep(1000)


def loops() -> None:
    """With the GIL, but for the moments in which Python gives it away."""
    while True:
        pass


def holds_the_gil() -> None:
    """In C, where Python does not; in a call that the kernel goes on with after a signal."""
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def destroyed() -> None:
    """All groups are gone."""


def begins() -> None:
    """There is no group yet."""
    Path(f"ready-{os.environ['RANK']}").touch()
    sleeps()


def main(where: str) -> None:
    if where == "begins":
        begins()
    dist.init_process_group("mpiplus")
    for _ in range(50):
        dist.all_reduce(torch.ones(2))
    if where == "destroyed":
        dist.destroy_process_group()
    Path(f"ready-{os.environ['RANK']}").touch()
    if where in ("destroyed", "everybody"):
        sleeps()
    if dist.get_rank() == 1:
        globals()[where]()
    dist.all_reduce(torch.ones(2))


main(sys.argv[1])
