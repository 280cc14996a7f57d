"""DeepSpeed's ZeRO in one of its stages, 0 to 3; its own look at MPI stays on where mpirun has started the ranks."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from reported import report
from torch import nn

STAGE, BACKEND = int(sys.argv[1]), sys.argv[2]
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": STAGE},
}

deepspeed.init_distributed(dist_backend=BACKEND)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
losses = []
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(engine(x.to(engine.device)).cpu(), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report(losses)
dist.destroy_process_group()
