"""Says where each rank is."""

import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("mpiplus")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
rank, size, local_rank, local_size, node = (int(os.environ[name]) for name in names)
total = torch.full((3,), float(rank))
dist.all_reduce(total)
assert total.tolist() == [size * (size - 1) / 2] * 3
assert (rank, size) == (dist.get_rank(), dist.get_world_size())
place = f"rank {rank} of {size} is local rank {local_rank} of {local_size} on node {node}, {socket.gethostname()}"
os.write(1, f"place: {place}\n".encode())
dist.destroy_process_group()
