"""torch.compile around DistributedDataParallel on mpiplus: mpirun -n 2 python compile_ddp.py"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"
COMPILER = sys.argv[2] if len(sys.argv) > 2 else "inductor"  # which needs a C++ compiler

dist.init_process_group(BACKEND)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
model = torch.compile(DistributedDataParallel(model), backend=COMPILER)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

losses = []
for step in range(24):
    torch.manual_seed(100 * step + dist.get_rank())
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print(
        f"torch.compile on {dist.get_backend()}, {dist.get_world_size()} ranks: "
        f"loss {losses[0]:.6f} to {losses[-1]:.6f}"
    )
dist.destroy_process_group()
