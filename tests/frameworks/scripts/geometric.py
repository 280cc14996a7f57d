"""torch_geometric: a GCN under DDP, each rank with its own graphs."""

import sys

import torch
import torch.distributed as dist
from reported import report
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

dist.init_process_group(sys.argv[1])
torch.manual_seed(dist.get_rank())
graphs = [Data(x=torch.randn(6, 8), edge_index=torch.randint(0, 6, (2, 12)), y=torch.randn(1)) for _ in range(32)]


class Net(torch.nn.Module):
    """One layer over a graph's edges, and a number for the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = GCNConv(8, 16), torch.nn.Linear(16, 1)

    def forward(self, data: Data) -> torch.Tensor:
        return self.head(global_mean_pool(self.layer(data.x, data.edge_index).relu(), data.batch)).squeeze(1)


torch.manual_seed(1)
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for batch in DataLoader(graphs, batch_size=4):
    loss = torch.nn.functional.mse_loss(model(batch), batch.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses)
dist.destroy_process_group()
