"""Lightning: two epochs with a checkpoint, two more in a new Trainer that goes on from it."""

import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from reported import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1]
PLACE = Path(f"checkpoints-{BACKEND}")


class Regression(lightning.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(epochs: int, checkpoint: Path | None) -> list[float]:
    lightning.seed_everything(1, verbose=False)
    inputs = torch.randn(128, 8)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=BACKEND),
        max_epochs=epochs,
        logger=False,
        callbacks=[ModelCheckpoint(PLACE, filename="last")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    # weights_only: the checkpoint is this script's own, and has more than tensors.
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=checkpoint, weights_only=False)
    return model.losses


before = train(2, None)
after = train(4, PLACE / "last.ckpt")
assert (len(before), len(after)) == (2, 2), "it has not gone on from the checkpoint"
report([*before, *after])
dist.destroy_process_group()
