"""Programs that `mpiplus status` looks at: rank 1 is somewhere, the others wait for it in an all_reduce; and programs
that it asks at the edges: they come to their world in some other way."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from torchmpi_plugin import prometheus, statistics
from torchmpi_plugin.group import world

kept: list[object] = []


def split() -> None:
    """A group of split_group is counted as one of new_group is."""
    dist.init_process_group("mpiplus")
    group = dist.group.WORLD.split_group([0, 1], group_name='a "part"')
    dist.all_reduce(torch.ones(2), group=group)
    assert statistics(group)["operations"]["all_reduce"]["calls"] == 1
    assert 'mpiplus_calls_total{group="a \\"part\\"",rank="' in prometheus(group)
    kept.append(group)


def dropped() -> None:
    """Without destroy: it leaves what is shown, and stays in the summary."""
    split()
    dist.barrier()  # another group's call is the last one
    kept.clear()
    gc.collect()


def failed() -> None:
    """An init that has failed with its group made, whose traceback somebody keeps, and is repeated."""
    with mock.patch.object(world, "adopt", side_effect=OSError("no")):
        try:
            dist.init_process_group("mpiplus")
        except OSError as error:
            kept.append(error)
    dist.init_process_group("mpiplus")


def thread() -> None:
    """The thread that made the world has ended."""
    maker = threading.Thread(target=dist.init_process_group, args=("mpiplus",))
    maker.start()
    maker.join()


def file() -> None:
    """Jobs that meet elsewhere may have one MASTER_PORT."""
    variables = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    (found,) = [names for names in variables if names[0] in os.environ]
    rank, size = (int(os.environ[name]) for name in found)
    dist.init_process_group("mpiplus", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=size)


WAYS = {way.__name__: way for way in (split, dropped, failed, thread, file)}


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


def main(what: str) -> None:
    if what == "begins":
        begins()
    WAYS.get(what, lambda: dist.init_process_group("mpiplus"))()
    for _ in range(50):
        dist.all_reduce(torch.ones(2))
    if what == "destroyed":
        dist.destroy_process_group()
    Path(f"ready-{os.environ['RANK']}").touch()
    if what in ("destroyed", "everybody"):
        sleeps()
    if dist.get_rank() == 1:
        (sleeps if what in WAYS else globals()[what])()
    dist.all_reduce(torch.ones(2))


main(sys.argv[1])
