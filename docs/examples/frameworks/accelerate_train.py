"""Accelerate's loop on mpiplus: mpirun -n 2 python accelerate_train.py"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchmpi_plugin import integrations

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"

integrations.activate("accelerate")  # or the variable MPIPLUS_INTEGRATIONS=accelerate
accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)])
set_seed(1)
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))

losses = []
for _ in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.print(
    f"accelerate on {accelerator.state.backend}, {accelerator.num_processes} ranks: "
    f"loss {losses[0]:.6f} to {losses[-1]:.6f}"
)
accelerator.end_training()
