"""What PyTorch's tutorial on DistributedDataParallel does, on mpiplus: mpirun -n 2 python ddp_tutorial.py

A toy model trained on all ranks; then a checkpoint that rank 0 saves and all ranks load after a barrier. The tutorial
starts its processes itself: here mpirun does, so there is no spawn and no MASTER_ADDR.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"


class ToyModel(nn.Module):
    """The tutorial's."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def steps(model: nn.Module, count: int) -> list[float]:
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(count):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(20, 10)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :5])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


dist.init_process_group(BACKEND)
torch.manual_seed(1)
model = DistributedDataParallel(ToyModel())
losses = steps(model, 12)

path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(path)
file = Path(path[0]) / "model.pt"
if dist.get_rank() == 0:
    torch.save(model.state_dict(), file)
dist.barrier()
copy = DistributedDataParallel(ToyModel())
copy.load_state_dict(torch.load(file, weights_only=True))
losses += steps(copy, 12)
dist.barrier()
if dist.get_rank() == 0:
    file.unlink()
    print(f"DDP on {dist.get_backend()}, {dist.get_world_size()} ranks: loss {losses[0]:.6f} to {losses[-1]:.6f}")
dist.destroy_process_group()
