"""DeepSpeed's ZeRO on mpiplus, stage 2 or another: mpirun -n 2 python deepspeed_zero.py [BACKEND [STAGE [discover]]]"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"
STAGE = int(sys.argv[2]) if len(sys.argv) > 2 else 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},  # DeepSpeed's own is compiled when used
    "zero_optimization": {"stage": STAGE},
    "bf16": {"enabled": True},
}

# mpiplus asks MPI itself, so DeepSpeed need not.
deepspeed.init_distributed(dist_backend=BACKEND, auto_mpi_discovery="discover" in sys.argv)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

losses = []
for step in range(24):
    torch.manual_seed(100 * step + dist.get_rank())
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(engine(x.to(engine.device, torch.bfloat16)).float().cpu(), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print(f"deepspeed on {dist.get_backend()}, {dist.get_world_size()} ranks: loss {losses[0]:.6f} to {losses[-1]:.6f}")
dist.destroy_process_group()
