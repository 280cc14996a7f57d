"""torchrec: two embedding tables, one on each rank, under a dense layer."""

import sys

import torch
import torch.distributed as dist
from reported import report
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

NAMES = ("reader", "book")
cpu = torch.device("cpu")
dist.init_process_group(sys.argv[1])
world, rank = dist.get_world_size(), dist.get_rank()


class Model(torch.nn.Module):
    """A number for each reader and book."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(
            [EmbeddingBagConfig(num_embeddings=64, embedding_dim=8, name=n, feature_names=[n]) for n in NAMES],
            device=cpu,
        )
        self.head = torch.nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.head(self.embeddings(features).values()).squeeze(1)


torch.manual_seed(1)
whole = Model()
constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in NAMES}
planner = EmbeddingShardingPlanner(topology=Topology(world, "cpu", local_world_size=world), constraints=constraints)
sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
model = DistributedModelParallel(whole, device=cpu, plan=planner.plan(whole, [sharder]), sharders=[sharder])
optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.1)
losses = []
for step in range(8):
    torch.manual_seed(100 * step + rank)
    lengths = torch.randint(1, 4, (2 * 16,))
    values = torch.randint(0, 64, (int(lengths.sum()),))
    features = KeyedJaggedTensor(keys=list(NAMES), values=values, lengths=lengths)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(features), torch.randn(16))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses)
dist.destroy_process_group()
