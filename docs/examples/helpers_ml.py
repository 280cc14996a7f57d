"""A training script written for ml's `ml.utils.torch_distributed`; only the import lines are others.

    python helpers_ml.py                    # starts 4 ranks itself
    mpirun -n 4 python helpers_ml.py        # is one of them

The first layer is shared out over pairs of ranks (model parallel), the pairs train on different samples (data
parallel). Rank zero prepares the data first, and writes the checkpoint. Needs scikit-learn. The exit code is 0 when
90 % of the test set are right.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchmpi_plugin.dist import compute_and_broadcast, is_main_process, reduce_and_broadcast, zero_first
from torchmpi_plugin.launch import (  # was: from ml.utils.torch_distributed import (
    MultiprocessConfig,
    all_to_all,
    launch_subprocesses,
    parallel_group_info,
)

HIDDEN = 64


class SharedLayers(nn.Module):
    """Two layers. Each rank of a model group does a slice of the hidden units, for all samples of the group."""

    def __init__(self) -> None:
        super().__init__()
        groups = parallel_group_info()
        self.group, self.size = groups.mp.group, groups.mp.world_size
        torch.manual_seed(groups.mp.rank)  # other weights in each slice, the same ones in all copies
        self.first = nn.Linear(64, HIDDEN // self.size)
        torch.manual_seed(99)
        self.last = nn.Linear(HIDDEN, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Hidden units travel: from all samples of one slice to all slices of some samples."""
        slices = torch.relu(self.first(images))
        mine = all_to_all(slices, self.group)
        return self.last(torch.cat(mine.chunk(self.size), dim=1))


def prepare_data(cache: Path) -> tuple[Tensor, Tensor]:
    """All images and labels: rank zero writes them, then the others read them."""
    file = cache / "digits.pt"
    with zero_first(is_main_process()):
        if not file.exists():
            digits = load_digits()
            order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
            images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
            torch.save((images, torch.tensor(digits.target)[order]), file)
        images, labels = torch.load(file)
    return images, labels


def average_gradients(model: SharedLayers) -> None:
    """A slice's gradient is the sum of its group's; copies of a layer take the mean of theirs."""
    for name, parameter in model.named_parameters():
        if name.startswith("first"):
            dist.all_reduce(parameter.grad, group=parallel_group_info().dp.group)
        else:
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(epochs: int, directory: str | None) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    output = compute_and_broadcast(lambda: Path(directory or tempfile.mkdtemp()))
    images, labels = prepare_data(output)
    groups = parallel_group_info()
    model = SharedLayers()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    order = torch.Generator().manual_seed(groups.dp.rank)  # a model group has the same samples
    loss = torch.zeros(())
    for _ in range(epochs * 22):
        rows = torch.randint(1440, (64 // groups.dp.world_size,), generator=order)
        optimizer.zero_grad()
        loss = cross_entropy(model(images[rows]), labels[rows].chunk(groups.mp.world_size)[groups.mp.rank])
        loss.backward()
        average_gradients(model)
        optimizer.step()

    test = slice(1440, 1440 + (len(images) - 1440) // groups.mp.world_size * groups.mp.world_size)
    with torch.no_grad():
        answers = model(images[test]).argmax(dim=1)
    right = (answers == labels[test].chunk(groups.mp.world_size)[groups.mp.rank]).float().mean().item()
    accuracy = reduce_and_broadcast(lambda: right, lambda values: sum(values) / len(values))
    mean_loss = reduce_and_broadcast(loss.item, lambda values: sum(values) / len(values))
    if is_main_process():
        torch.save(model.state_dict(), output / "ml.pt")
        print(f"{dist.get_world_size()} ranks: loss {mean_loss:.3f}, test accuracy {accuracy:.3f}, saved in {output}")
    if accuracy < 0.9:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits, with ml's launcher.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", help="directory for the cache and the checkpoint")
    arguments = parser.parse_args()
    config = MultiprocessConfig(world_size=arguments.ranks, model_parallelism=2 if arguments.ranks % 2 == 0 else 1)
    launch_subprocesses(train, config, None, 0, arguments.epochs, arguments.output)
