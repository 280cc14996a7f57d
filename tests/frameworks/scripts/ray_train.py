"""Ray Train: two workers that Ray starts, started as a plain program."""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

BACKEND = sys.argv[1]
PLACE = Path.cwd()


def train(settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    inputs, losses = torch.randn(64, 8), []
    for _ in range(5):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    words = " ".join(f"{number:.5f}" for number in total.tolist())
    own = f"<{dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: {words}>\n"
    Path(settings["place"], f"rank{dist.get_rank()}").write_text(own)


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
try:
    TorchTrainer(
        train,
        train_loop_config={"place": str(PLACE)},
        torch_config=TorchConfig(backend=BACKEND, timeout_s=120),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(PLACE / "ray"), name=f"run-{BACKEND}"),
    ).fit()
    for each in sorted(PLACE.glob("rank*")):
        print(each.read_text(), end="")
finally:
    ray.shutdown()
