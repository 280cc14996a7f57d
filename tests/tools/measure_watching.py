"""What it costs a job to be watched: an 8-byte all_reduce with `mpiplus status --watch` and without, in turns.

mpiplus run -n 2 tests/tools/measure_watching.py
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

TURNS, SECONDS, BLOCK = 6, 4.0, 500


@contextlib.contextmanager
def watched(wanted: bool) -> Iterator[None]:
    """Rank 0 watches, twice a second; all start together."""
    command = [str(Path(sys.executable).with_name("mpiplus")), "status", "--watch", "0.5"]
    watch = None
    if wanted and dist.get_rank() == 0:
        watch = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(3)  # until it has started
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if watch is not None:
            watch.terminate()
            watch.wait()


def microseconds() -> list[float]:
    """Of an all_reduce, for each block of them."""
    tensor, found = torch.ones(2), []
    until = time.monotonic() + SECONDS
    is_over = torch.zeros(1)
    while not is_over:
        began = time.perf_counter()
        for _ in range(BLOCK):
            dist.all_reduce(tensor)
        found.append(1e6 * (time.perf_counter() - began) / BLOCK)
        is_over[0] = time.monotonic() > until
        dist.broadcast(is_over, src=0)
    return sorted(found)


def main() -> None:
    dist.init_process_group("mpiplus")
    with watched(False):
        microseconds()
    best: dict[bool, list[float]] = {False: [], True: []}
    middle: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TURNS):
        for wanted in (False, True):
            with watched(wanted):
                found = microseconds()
            best[wanted].append(found[0])
            middle[wanted].append(found[len(found) // 2])
    if dist.get_rank() == 0:
        for wanted, name in ((False, "not watched"), (True, "watched")):
            medians = sorted(middle[wanted])
            print(f"{name}: best {min(best[wanted]):.2f} us, median of the turns' medians {medians[TURNS // 2]:.2f} us")
    dist.destroy_process_group()


main()
