"""Ranks survive a failure, finish their work, and end a while apart: none takes the others along."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, groups_made_by, raises, run

import torchmpi_plugin
from torchmpi_plugin.mpi import nonblocking, runtime

FAILING = 1
SHORT, LONG = timedelta(seconds=2), timedelta(seconds=90)
APART = 3.0


def new_group(how: str) -> None:
    """A rank comes late to MPI's call for a group, or never; the others have given up."""
    dist.init_process_group("mpiplus", timeout=LONG)

    def late(make: Callable[..., Any]) -> Callable[..., Any]:
        def create(*arguments: Any) -> Any:
            time.sleep(5)
            if how == "never":
                raise OSError("this one is meant")
            return make(*arguments)

        return create

    with (
        groups_made_by(late if ME == FAILING else lambda make: make),
        raises((dist.DistBackendError, OSError), "gave up|this one is meant"),
    ):
        dist.new_group(timeout=SHORT)
    check_works()
    check_works(dist.new_group(timeout=LONG))
    dist.destroy_process_group()


def no_world(where: str) -> None:
    """A rank does not come to init_process_group, or not further than its beginning."""
    runtime.mpi().COMM_WORLD.Barrier()
    gather = nonblocking.all_gather

    def fails(*arguments: Any) -> Any:
        raise OSError("this one is meant")

    if ME == FAILING and where == "gather":
        nonblocking.all_gather = fails
    if ME == FAILING and where != "gather":
        time.sleep(4)
    else:
        with raises((dist.DistBackendError, OSError), "after 2 s|this one is meant"):
            dist.init_process_group("mpiplus", timeout=SHORT)
    nonblocking.all_gather = gather


def aborted(how: str) -> None:
    """A group is aborted while MPI sends and receives for it; another one goes on."""
    dist.init_process_group("mpiplus", timeout=LONG)
    group = dist.new_group()
    check_works(group)
    long = torch.ones(SIZE << 23)
    if ME != FAILING:
        if how == "send":
            work = dist.isend(long, FAILING, group=group)
        else:
            work = dist.all_to_all_single(torch.zeros_like(long), long, group=group, async_op=True)
        group.set_timeout(0.5)
        with raises(dist.DistBackendError, "timed out"):
            dist.recv(torch.ones(1), FAILING, group=group, tag=1)
        group.abort()
        with raises(dist.DistBackendError, "was aborted; before that: recv .* timed out"):
            work.wait()
        del work
    check_works()
    check_works(dist.new_group())
    dist.destroy_process_group()


def dead(how: str) -> None:
    """A rank dies; the others go on without it, or end."""
    dist.init_process_group("mpiplus", timeout=LONG)
    check_works()
    if ME == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(torchmpi_plugin.RankFailedError, "has ended|has died"):
        while True:
            dist.all_reduce(torch.ones(3))
    if how == "shrunk":
        check_works(torchmpi_plugin.shrink())
        dist.destroy_process_group()


def last(first: str, scenario: Callable[[str], None]) -> Callable[[str], None]:
    def then_apart(how: str) -> None:
        scenario(how)
        time.sleep(APART * (ME if first == "0" else SIZE - 1 - ME))

    return then_apart


run(
    {
        f"{scenario.__name__}-{first}": last(first, scenario)
        for scenario in (new_group, no_world, aborted, dead)
        for first in ("0", "last")
    }
)
