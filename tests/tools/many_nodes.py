"""Whose collectives are faster on many nodes: the three choices of ``Options(collectives=...)`` in turns, in one job.

One rank on each node, as tests/hosts/on_nodes.py makes them: docs/scaling.md has the command and a table.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchmpi_plugin import Options

warnings.filterwarnings("ignore", category=FutureWarning)  # of names that torch 2.13 has newer ones for
CHOICES = ("auto", "mpi", "own")
TURNS = 5
Call = Callable[[dist.ProcessGroup], object]


def calls(ranks: int) -> dict[str, tuple[int, Call]]:
    """By name: how many are timed together, and the call."""

    def all_reduce(nbytes: int) -> Call:
        tensor = torch.ones(nbytes // 4)
        return lambda group: dist.all_reduce(tensor.fill_(1), group=group)

    word = torch.ones(1024)
    part = torch.ones(256 // ranks)
    whole = torch.empty(256 // ranks * ranks)
    return {
        "barrier": (20, lambda group: dist.barrier(group=group)),
        "all_reduce 8 B": (20, all_reduce(8)),
        "all_reduce 4 KiB": (20, all_reduce(4 << 10)),
        "all_reduce 16 KiB": (20, all_reduce(16 << 10)),
        "broadcast 4 KiB": (20, lambda group: dist.broadcast(word, 0, group=group)),
        "all_gather 1 KiB in all": (20, lambda group: dist.all_gather_into_tensor(whole, part, group=group)),
        "all_reduce 1 MiB": (3, all_reduce(1 << 20)),
    }


def microseconds(call: Call, times: int, group: dist.ProcessGroup) -> float:
    """Of one call, on the slowest rank."""
    call(group)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        call(group)
    took = torch.tensor([(time.perf_counter() - begin) / times * 1e6])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    """Print a row for each call."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    dist.init_process_group("mpiplus")
    setup = time.perf_counter() - begin
    groups = {name: dist.new_group(pg_options=Options(collectives=name)) for name in CHOICES}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, (times, call) in calls(ranks).items():
        found: dict[str, list[float]] = {choice: [] for choice in CHOICES}
        for _ in range(TURNS):
            for choice, group in groups.items():
                found[choice].append(microseconds(call, times, group))
        if rank == 0:
            print(f"| {name} | " + " | ".join(f"{statistics.median(found[each]):,.0f}" for each in CHOICES) + " |")
    if rank == 0:
        print(f"{ranks} ranks; init_process_group took {setup:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
