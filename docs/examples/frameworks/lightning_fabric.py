"""Lightning's Fabric on mpiplus: mpirun -n 2 python lightning_fabric.py"""

import os
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"

fabric = Fabric(
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),  # ranks on this node
    strategy=DDPStrategy(process_group_backend=BACKEND),
)
fabric.launch()
fabric.seed_everything(1, verbose=False)
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))

losses = []
for _ in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
if fabric.is_global_zero:
    print(
        f"lightning fabric on {dist.get_backend()}, {fabric.world_size} ranks: loss {losses[0]:.6f} to {losses[-1]:.6f}"
    )
dist.destroy_process_group()
