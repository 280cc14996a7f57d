"""What cannot be is refused by name, before anybody waits; what the program does with MPI is no failure of ours."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from mpi4py import MPI
from steps import ME, SIZE, check_works, raises, run

import torchmpi_plugin

IMPOSSIBLE = (timedelta.max, timedelta(0), timedelta(seconds=-1))


def refused() -> None:
    for timeout in IMPOSSIBLE:
        with raises(ValueError, "^init_process_group: the timeout must be more than 0"):
            dist.init_process_group("mpiplus", timeout=timeout)
    with mock.patch("_thread.allocate_lock", lambda: None), raises(RuntimeError, r"patch_all\(thread=False\)"):
        dist.init_process_group("mpiplus")
    os.environ["TORCH_FR_BUFFER_SIZE"] = "many"
    with raises(ValueError, "TORCH_FR_BUFFER_SIZE must be a number"):
        dist.init_process_group("mpiplus")
    del os.environ["TORCH_FR_BUFFER_SIZE"]
    dist.init_process_group("mpiplus")
    for timeout in IMPOSSIBLE:
        with raises(ValueError, "^new_group: the timeout must be"):
            dist.new_group(timeout=timeout)
        with raises(ValueError, "^monitored_barrier: the timeout must be"):
            torchmpi_plugin.monitored_barrier(timeout=timeout)
        with raises(ValueError, "^set_timeout: the timeout must be"):
            dist.group.WORLD.set_timeout(timeout)
    for timed in (torchmpi_plugin.monitored_barrier, dist.group.WORLD.set_timeout):
        with raises(TypeError, "the timeout must be a datetime.timedelta, not 3$"):
            timed(timeout=3)
    closed = dist.new_group()
    dist.destroy_process_group(closed)
    for call in (lambda: closed.send([torch.ones(6)], 1, 0), closed.barrier):
        with raises(dist.DistBackendError, "is destroyed"):
            call()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait(timedelta(0))  # torch's own word for the operation's own deadline
    check_works()
    torchmpi_plugin.get_comm().Free()
    dist.destroy_process_group()


def finalized() -> None:
    dist.init_process_group("mpiplus")
    group = dist.new_group()
    check_works()
    torchmpi_plugin.get_comm().Barrier()
    MPI.Finalize()
    for call in (lambda: dist.send(torch.ones(1), (ME + 1) % SIZE), lambda: dist.all_reduce(torch.ones(1))):
        with raises(dist.DistBackendError, "has ended as the program called MPI_Finalize; call that after the last"):
            call()
    for call in (
        dist.new_group,
        lambda: group.split_group([0, 1]),
        lambda: torchmpi_plugin.get_comm(group),
        torchmpi_plugin.shrink,
        lambda: [dist.destroy_process_group(), dist.init_process_group("mpiplus")],
    ):
        with raises(RuntimeError, "the program has called MPI_Finalize, and MPI cannot be started again"):
            call()


run(globals())
