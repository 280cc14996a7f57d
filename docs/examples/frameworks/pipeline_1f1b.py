"""A pipeline with the schedule 1F1B on mpiplus, one stage for each rank: mpirun -n 2 python pipeline_1f1b.py"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"
MICROBATCHES = 4

dist.init_process_group(BACKEND)
rank, ranks = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == ranks - 1
torch.manual_seed(rank)
module = nn.Sequential(nn.Linear(8 if first else 32, 1 if last else 32), nn.Identity() if last else nn.ReLU())
optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)

means = []
for step in range(24):
    torch.manual_seed(step)
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    if first:
        schedule.step(x)
    elif last:
        losses: list[torch.Tensor] = []
        schedule.step(target=x.sum(1, keepdim=True), losses=losses)
        means.append(torch.stack(losses).mean().item())
    else:
        schedule.step()
    optimizer.step()
if last:
    print(f"pipeline on {dist.get_backend()}, {ranks} ranks: loss {means[0]:.6f} to {means[-1]:.6f}", flush=True)
dist.destroy_process_group()
