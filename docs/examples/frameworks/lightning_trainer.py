"""Lightning's Trainer on mpiplus: mpirun -n 2 python lightning_trainer.py"""

import os
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"


class Regression(lightning.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(1, verbose=False)
inputs = torch.randn(128, 8)
model = Regression()
trainer = lightning.Trainer(
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),  # ranks on this node
    strategy=DDPStrategy(process_group_backend=BACKEND),
    max_epochs=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
if trainer.is_global_zero:
    print(
        f"lightning trainer on {dist.get_backend()}, {trainer.world_size} ranks: "
        f"loss {model.losses[0]:.6f} to {model.losses[-1]:.6f}"
    )
dist.destroy_process_group()
