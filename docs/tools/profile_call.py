#!/usr/bin/env python3
"""What one all_reduce of 8 bytes is made of, through C and through Python, in one run: a table for docs/performance.md.

One rank, so that nobody is waited for: mpirun -n 1 python docs/tools/profile_call.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torchmpi_plugin  # noqa: F401 - registers the backend
from torchmpi_plugin import _bridge
from torchmpi_plugin.cli.bench.front_end import new_empty_group
from torchmpi_plugin.engine import profiling
from torchmpi_plugin.engine.work import Work

TURNS, CALLS = 15, 2000


def microseconds(parts: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least time of a call of each part, over turns that the parts take one after the other."""
    least = dict.fromkeys(parts, float("inf"))
    for _ in range(TURNS):
        for name, call in parts.items():
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e6)
    return least


def main() -> None:
    """Print the table."""
    dist.init_process_group("mpiplus")
    group, empty, tensor = dist.group.WORLD, new_empty_group(), torch.ones(2)
    options = c10d.AllreduceOptions()
    options.asyncOp = False

    def through(python_only: bool, call: Callable[[], object]) -> Callable[[], object]:
        def counted() -> None:
            group._calls.python_only = python_only
            call()

        return counted

    def nothing() -> None:
        group._calls.python_only = False

    parts = {
        "the loop around each of these": nothing,
        "dist.all_reduce on a group that does nothing": lambda: dist.all_reduce(tensor, group=empty),
        "dist.all_reduce, through Python": through(True, lambda: dist.all_reduce(tensor)),
        "dist.all_reduce, through C": through(False, lambda: dist.all_reduce(tensor)),
        "group.allreduce, through Python": through(True, lambda: group.allreduce([tensor], options)),
        "group.allreduce, through C": through(False, lambda: group.allreduce([tensor], options)),
        "of that: the tensor's address": lambda: _bridge.view(tensor),
        "is_neg()": tensor.is_neg,
        "asyncOp": lambda: options.asyncOp,
        "reduceOp and its number": lambda: hash(options.reduceOp),
        "is this thread profiled?": profiling.wanted,
        "the Work": Work,
    }
    found = microseconds(parts)
    if dist.get_rank() == 0:
        print("| part | us |\n|---|---|")
        for name, us in found.items():
            print(f"| {name} | {us:.2f} |")
    dist.destroy_process_group()


main()
