"""What happens when a rank does not come, comes late, or stops."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say, wait_for

from torchmpi_plugin.mpi import nonblocking

SHORT = timedelta(seconds=3)
#: Nothing that has this much time may run out of it, however busy the machine.
LONG = timedelta(seconds=90)


def tell(directory: str, sign: str) -> None:
    (Path(directory) / sign).touch()


def hear(directory: str, *signs: str) -> None:
    for sign in signs:
        wait_for(Path(directory) / sign)


def stopped(directory: str, who: str, how: str) -> None:
    """One rank is stopped until the others have given up; then it goes on, and the world with it."""
    victim = int(who)
    others = [rank for rank in range(SIZE) if rank != victim]
    pids, group = started()
    if victim == ME:
        os.kill(os.getpid(), signal.SIGSTOP)
        say("goes on")
    else:
        store_answers = victim != 0 or os.environ["MPIPLUS_COLLECTIVES"] == "auto"
        with raises(dist.DistBackendError, *message(victim, store_answers)) as caught:
            all_reduce(group, how)
        for innocent in others:
            assert not re.search(rf"Not arrived: ranks? [\d, ]*\b{innocent}\b", str(caught[0])), caught[0]
        say(f"gave up: {caught[0]}")
        tell(directory, f"gave-up-{ME}")
        if others[0] == ME:
            hear(directory, *(f"gave-up-{rank}" for rank in others))
            os.kill(pids[victim], signal.SIGCONT)
    if victim == ME:
        all_reduce(group, how)  # the others' operations were given up, not taken back
    check_works()
    if victim != ME:
        with raises(dist.DistBackendError, "out of step since", rf"\brank {victim}\b.*; make a new group"):
            dist.barrier(group)
    check_works(dist.new_group(timeout=LONG))


def all_reduce(group: dist.ProcessGroup, how: str) -> None:
    work = dist.all_reduce(torch.ones(7), group=group, async_op=how == "async")
    if work is not None:
        work.wait()


def message(missing: int, known: bool) -> tuple[str, ...]:
    """Operation, sequence number, group, own rank, time, and who was missing.

    Where neither shared memory nor the store tells (not ``known``), it must at least come up.
    """
    return (
        *(r"^all_reduce of \(7,\) float32", r"sequence number \d+", r"group '", rf"on rank {ME}\b"),
        *(r"after \d+\.\d s", r"the timeout is 3 s"),
        rf"Not arrived: rank {missing} " if known else rf"\brank {missing}\b",
    )


def absent_member(directory: str) -> None:
    """A member that never comes to new_group, or makes it with other ranks, is named; the other groups go on."""
    dist.init_process_group("mpiplus", timeout=LONG)
    with raises(dist.DistBackendError, "creating group", r"rank [01] of the world makes it of ranks 0, 1"):
        dist.new_group([0, 1] if ME == 0 else None, timeout=LONG)
    check_works()
    absent = SIZE - 1
    if absent == ME:
        hear(directory, *(f"gave-up-{rank}" for rank in range(absent)))
    else:
        with raises(dist.DistBackendError, "creating group", rf"rank {ME} of {SIZE}", rf"rank {absent} did not come"):
            dist.new_group(timeout=SHORT)
        tell(directory, f"gave-up-{ME}")
    check_works()


def started() -> tuple[list[int], dist.ProcessGroup]:
    """The process of each rank, and a group that gives up soon."""
    dist.init_process_group("mpiplus", timeout=LONG)
    pids = [0] * SIZE
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group(timeout=SHORT)
    check_works(group)
    return pids, group


def go_on_when_all_gave_up(directory: str, error: BaseException, stopped: int) -> None:
    """The last rank is stopped. All others wait for each other: a launcher ends them when one has left without
    MPI_Finalize, and drops their output."""
    say(f"gave up: {error}")
    tell(directory, f"gave-up-{ME}")
    hear(directory, *(f"gave-up-{rank}" for rank in range(SIZE - 1)))
    if ME == 0:
        os.kill(stopped, signal.SIGCONT)


def stopped_inside(directory: str) -> None:
    """One rank is stopped after it has begun its call, in the middle of it."""
    victim = SIZE - 1
    pids, group = started()
    tensor = torch.ones(1 << 24)  # many times what fits into the slots: nobody can get to the end without the victim
    if victim == ME:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(0.3)  # it has begun
        os.kill(os.getpid(), signal.SIGSTOP)
        del work
    else:
        expected = rf"arrived: ranks? 0[, \d]*; arrived, and gave no answer since: rank {victim} \(stopped, dead"
        if os.environ["MPIPLUS_SHM"] == "0":  # where only the rank itself knows that it has arrived
            expected = rf"Not arrived: rank {victim} \(gave no answer: stopped, dead.*; arrived: ranks 0, 1$"
        with raises(dist.DistBackendError, "timed out", expected) as caught:
            while ") T " not in Path(f"/proc/{pids[victim]}/stat").read_text():  # stopped, in the kernel's words
                time.sleep(0.01)
            dist.all_reduce(tensor, group=group)
        go_on_when_all_gave_up(directory, caught[0], pids[victim])
    say("end")
    os._exit(0)


def init_without(where: str) -> None:
    """One rank sleeps: with MPI initialised, or before it is; or fails, or is stopped, while the store is made."""
    if ME == 1 and where in ("initialised", "never"):
        if where == "initialised":
            from mpi4py import MPI

            assert MPI.Is_initialized()
        time.sleep(1000)
    if ME == 1:
        name = "barrier" if where == "barrier" else "all_gather"
        left = {"stopped": 3, "raises": 2}.get(where, 1)  # calls until it does

        def fails(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and where == "raises":
                raise OSError("nothing goes any more")
            if left == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*arguments)

        original = getattr(nonblocking, name)
        setattr(nonblocking, name, fails)
    tell(".", f"begins-{ME}")
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=5))
    say("came out of it")


def backward(directory: str) -> None:
    """DistributedDataParallel waits in C++, and gets the error there."""
    dist.init_process_group("mpiplus", timeout=LONG)
    group = dist.new_group(timeout=LONG)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
    group.set_timeout(SHORT)
    if ME == 0:
        with raises(RuntimeError, "DistBackendError: all_reduce.* timed out on rank 0"):
            model(torch.ones(2, 4)).sum().backward()
        tell(directory, "gave-up-0")
    else:
        hear(directory, "gave-up-0")
    check_works()
    say("goes on")


run(globals())
