"""heat: arrays over all ranks by mpi4py, while a model trains under DDP on what they come to."""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from reported import report
from torch.nn.parallel import DistributedDataParallel

# heat imports torchvision, and this uses nothing of it. PyPI's wheel is for torch's CUDA builds: beside another torch
# even `import transformers` fails.
sys.modules["torchvision"] = sys.modules["torchvision.transforms"] = MagicMock()

import heat  # noqa: E402

dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
points = heat.array(torch.randn(64, 8) * 3 + 1, split=0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
losses = []
for _ in range(8):
    # Both are under way at the same time: mpiplus's sum of all, and heat's own messages.
    total = torch.ones(50_000)
    work = dist.all_reduce(total, async_op=True)
    scaled = (points - heat.mean(points, axis=0)) / heat.std(points, axis=0)
    order = heat.sort(scaled[:, 0])[0]
    work.wait()
    mine = torch.from_numpy(scaled.numpy())[rank::size]
    loss = (model(mine).squeeze(1) - order.numpy()[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    points = heat.resplit(heat.resplit(points, 1), 0)
    losses.append(loss.item() * total.mean().item())
report(losses)
dist.destroy_process_group()
