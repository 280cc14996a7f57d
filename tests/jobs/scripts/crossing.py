"""Messages whose receives are in another order than the sends; each tag and group has a length of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist


def all_of(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None
        work.wait()


def exchange(tag: int) -> None:
    """On a thread for each tag; of one more either thread may be first."""
    for _ in range(50):
        for number, length in ((tag, 10 * tag), (6, 60)):
            (dist.send if rank == 0 else dist.recv)(torch.ones(length), 1 - rank, tag=number)


dist.init_process_group("mpiplus")
rank, group = dist.get_rank(), dist.new_group([1, 0])
for _ in range(20):
    if rank == 0:
        first, second, third = (torch.ones(length) for length in (10, 20, 30))
        all_of(dist.isend(first, 1, tag=1), dist.isend(second, 1, tag=2), dist.isend(third, 1, group, tag=1))
    else:
        second, third, first = (torch.empty(length) for length in (20, 30, 10))
        all_of(dist.irecv(second, 0, tag=2), dist.irecv(third, 0, group, tag=1), dist.irecv(first, tag=1))
with ThreadPoolExecutor() as threads:
    list(threads.map(exchange, (4, 5)))
dist.barrier()
future = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
time.sleep(0.05)
future.wait()
dist.destroy_process_group()
