"""DDP with a rank that is late in every third step: see its timeline (docs/timeline.md)."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, LATE_SECONDS = 12, 0.02


def main():
    dist.init_process_group("mpiplus")
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = [torch.nn.Linear(500, 500) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.ones(16, 500)
    for step in range(STEPS):
        if rank == 1 and step % 3 == 0:
            time.sleep(LATE_SECONDS)  # as a slow loader of data is
        model(data).sum().backward()
        optimizer.step()
        total = dist.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(0.002)  # while it computes
        total.wait()
        sent = dist.isend(torch.ones(100), (rank + 1) % size)
        dist.recv(torch.empty(100), (rank - 1) % size)
        sent.wait()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
