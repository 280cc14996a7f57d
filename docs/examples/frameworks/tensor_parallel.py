"""Tensor parallelism with sequence parallelism on mpiplus: mpirun -n 2 python tensor_parallel.py"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"

dist.init_process_group(BACKEND)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
# Each rank has some of the columns of the first layer and the rows of the second, and some of the samples.
plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
parallelize_module(model, mesh, plan)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

losses = []
for step in range(24):
    torch.manual_seed(step)
    x = torch.randn(32, 8)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print(
        f"tensor parallel on {dist.get_backend()}, {dist.get_world_size()} ranks: "
        f"loss {losses[0]:.6f} to {losses[-1]:.6f}"
    )
dist.destroy_process_group()
