"""Says what the ranks' sums are, to the bit: a hash of results of many sizes and types.

Arguments: for each rank the number of the node that it believes to be on. MPIPLUS_REPRODUCIBLE counts.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from mpi4py import MPI

from torchmpi_plugin.node import node

HERE = sys.argv[1:][MPI.COMM_WORLD.rank]
COUNTS = (1, 2, 7, 1000, 4095, 4097, 16_385, 100_003, 1_000_001)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2)
node.identity = lambda: f"node {HERE}"

torch.set_num_threads(1)
dist.init_process_group("mpiplus")
rank, size = dist.get_rank(), dist.get_world_size()
results = hashlib.sha256()


def keep(tensor: torch.Tensor) -> None:
    results.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def contribution(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    dice = torch.Generator().manual_seed(1000 * rank + count)
    return (torch.randn(count, generator=dice, dtype=torch.float64) * 10.0 ** (rank % 3)).to(dtype)


for dtype in TYPES:
    for count in COUNTS if dtype is torch.float32 else COUNTS[:-1]:
        whole = contribution(count, dtype)
        dist.all_reduce(whole)
        keep(whole)
        work = dist.all_reduce(again := contribution(count, dtype), async_op=True)
        work.wait()
        assert torch.equal(again, whole)
        average = contribution(count, dtype)
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        keep(average)
        scaled = contribution(count, dtype)
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.3 + rank))
        keep(scaled)
        root = count % size
        dist.reduce(scaled := contribution(count, dtype), root)
        dist.broadcast(scaled, root)
        keep(scaled)
        part = torch.empty(count, dtype=dtype)
        dist.reduce_scatter(part, [(contribution(count, torch.float64) + r).to(dtype) for r in range(size)])
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part)
        keep(torch.cat(parts))
os.write(1, f"bits: {rank} {results.hexdigest()}\n".encode())
dist.destroy_process_group()
