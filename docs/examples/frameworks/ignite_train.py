"""ignite on mpiplus: mpirun -n 2 python ignite_train.py"""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage
from torch import nn
from torch.utils.data import TensorDataset

from torchmpi_plugin import integrations

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"


def training(local_rank: int) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(128, 8)
    loader = idist.auto_dataloader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=1e-2))
    losses: list[float] = []

    def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        x, y = (each.to(idist.device()) for each in batch)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")  # over all ranks
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["loss"]))
    trainer.run(loader, max_epochs=4)
    if idist.get_rank() == 0:
        print(f"ignite on {idist.backend()}, {idist.get_world_size()} ranks: loss {losses[0]:.6f} to {losses[-1]:.6f}")


integrations.activate("ignite")  # or the variable MPIPLUS_INTEGRATIONS=ignite
with idist.Parallel(backend=BACKEND) as parallel:
    parallel.run(training)
