"""torchmetrics over all ranks' samples on mpiplus: mpirun -n 2 python torchmetrics_accuracy.py"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"

dist.init_process_group(BACKEND)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(8, 3))
teacher = torch.randn(8, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
# One that is a sum, one that is a list, whose parts are of different lengths on each rank.
accuracy = MetricCollection({"accuracy": MulticlassAccuracy(3, average="micro")})
mean, seen = MeanMetric(), CatMetric()

losses = []
for epoch in range(4):
    for step in range(8):
        torch.manual_seed(1000 * epoch + 10 * step + rank)
        x = torch.randn(16, 8)
        labels = (x @ teacher).argmax(1)
        optimizer.zero_grad()
        scores = model(x)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        accuracy.update(scores.detach(), labels)
        mean.update(loss.detach())
        seen.update(labels[: rank + 1].float())
    losses.append(mean.compute().item())
    result, samples = accuracy.compute()["accuracy"].item(), len(seen.compute())
    accuracy.reset(), mean.reset(), seen.reset()
if rank == 0:
    print(f"torchmetrics on {dist.get_backend()}, {ranks} ranks: loss {losses[0]:.6f} to {losses[-1]:.6f}, ", end="")
    print(f"accuracy {result:.6f}, {samples} labels kept")
dist.destroy_process_group()
