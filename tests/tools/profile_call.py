#!/usr/bin/env python3
"""What an all_reduce of 8 bytes is made of, and what follows an asynchronous one: tables for docs/performance.md.

One rank, so that nobody is waited for: mpirun -n 1 python tests/tools/profile_call.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torchmpi_plugin  # noqa: F401 - registers the backend
from torchmpi_plugin.cli.bench.front_end import EmptyGroup
from torchmpi_plugin.cli.bench.measure import used
from torchmpi_plugin.engine import profiling
from torchmpi_plugin.engine.work import PendingWork, Work

TURNS, CALLS = 15, 2000
Parts = dict[str, Callable[[], object]]


def measured(parts: Parts) -> dict[str, tuple[float, float, float]]:
    """Of the fastest turn of each part, the turns being taken one after the other: what one call takes of time and of
    processor time (of all threads), in microseconds, and its context switches."""
    found = dict.fromkeys(parts, (float("inf"),) * 3)
    for _ in range(TURNS):
        for part, call in parts.items():
            call()
            before, start = used(), time.perf_counter()
            for _ in range(CALLS):
                call()
            seconds, after = time.perf_counter() - start, used()
            cpu_seconds, *switches = (after[name] - before[name] for name in before)
            turn = (seconds * 1e6 / CALLS, cpu_seconds * 1e6 / CALLS, sum(switches) / CALLS)
            found[part] = min(found[part], turn)
    return found


def synchronous_parts(group: Any, empty: dist.ProcessGroup, tensor: torch.Tensor) -> Parts:
    """Through C and through Python."""
    options = c10d.AllreduceOptions()
    options.asyncOp = False

    def through(python_only: bool, call: Callable[[], object]) -> Callable[[], object]:
        def counted() -> None:
            group._calls.python_only = python_only
            call()

        return counted

    def nothing() -> None:
        group._calls.python_only = False

    return {
        "the loop around each of these": nothing,
        "dist.all_reduce on a group that does nothing": lambda: dist.all_reduce(tensor, group=empty),
        "dist.all_reduce, through Python": through(True, lambda: dist.all_reduce(tensor)),
        "dist.all_reduce, through C": through(False, lambda: dist.all_reduce(tensor)),
        "group.allreduce, through Python": through(True, lambda: group.allreduce([tensor], options)),
        "group.allreduce, through C": through(False, lambda: group.allreduce([tensor], options)),
        "is_neg()": tensor.is_neg,
        "asyncOp": lambda: options.asyncOp,
        "reduceOp and its number": lambda: hash(options.reduceOp),
        "is this thread profiled?": profiling.wanted,
        "the Work": Work,
    }


def asynchronous_parts(group: Any, tensor: torch.Tensor) -> Parts:
    """Each row does what the one before it does, and something more; but the rows of messages begin anew."""
    options = c10d.AllreduceOptions()
    options.asyncOp = True
    received = torch.empty(2)
    #: As DDP calls it: from C++, which finds the method of a group that is written in Python.
    from_cpp = dist.ProcessGroup.allreduce

    def began() -> Any:
        return from_cpp(group, [tensor], options)

    def message() -> Any:
        """Return the Work of a message to this rank itself, which is pending until its sender comes."""
        work = dist.irecv(received, 0)
        assert isinstance(work, PendingWork)
        return work

    def sent(work: Any) -> None:
        dist.isend(tensor, 0).wait()
        work.wait()

    def by_future(follow: Callable[[Any], Any]) -> None:
        future = follow(message().get_future())
        dist.isend(tensor, 0).wait()
        future.wait()

    return {
        "group.allreduce, asynchronous and complete in the call: a Work is made": lambda: group.allreduce(
            [tensor], options
        ),
        "the same, called from C++ as DDP does": began,
        "and get_future()": lambda: began().get_future(),
        "and then(callback)": lambda: began().get_future().then(lambda future: None),
        "and the wait() of what then() gave": lambda: began().get_future().then(lambda future: None).wait(),
        "irecv and isend, which are pending: wait() of both Works": lambda: sent(message()),
        "wait() of the future in place of irecv's Work: the thread that completes": lambda: by_future(lambda f: f),
        "and then(callback), which that thread calls": lambda: by_future(lambda f: f.then(lambda future: None)),
    }


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    dist.init_process_group("mpiplus")
    group, tensor = dist.group.WORLD, torch.ones(2)
    tables = (synchronous_parts(group, EmptyGroup.of_all_ranks(), tensor), asynchronous_parts(group, tensor))
    for parts in tables:
        found = measured(parts)
        if dist.get_rank() == 0:
            print("| part | us | processor time, us | context switches |\n|---|---|---|---|")
            for name, (us, cpu_us, switches) in found.items():
                print(f"| {name} | {us:.2f} | {cpu_us:.2f} | {switches:.2f} |")
            print()
    dist.destroy_process_group()


main()
