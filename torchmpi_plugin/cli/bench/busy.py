"""Processes that compute beside the ranks, as data loaders and neighbours do: ``mpiplus bench --busy``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ...mpi import runtime

#: On any core, until whoever has started it is gone.
_LOOP = """
import contextlib, os
with contextlib.suppress(OSError):
    os.sched_setaffinity(0, range(os.cpu_count()))
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1000000))
"""


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Within, ``count`` processes compute on each node. For all ranks."""
    if not count:
        yield
        return
    world = runtime.mpi().COMM_WORLD
    node = world.Split_type(runtime.mpi().COMM_TYPE_SHARED)
    is_first = node.Get_rank() == 0
    node.Free()
    if world.Get_rank() == 0:
        click.echo(f"Processes that compute beside the ranks of each node: {count}")
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count if is_first else 0):
            loops.append(subprocess.Popen([sys.executable, "-c", _LOOP]))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
