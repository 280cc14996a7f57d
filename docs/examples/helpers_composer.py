"""A training script written for Composer's `composer.utils.dist`; only the import line is another.

    mpirun -n 4 python helpers_composer.py

Rank zero of each node prepares the data first, each rank trains on its share, the test set is evaluated by all
ranks, and rank zero writes the checkpoint. Needs scikit-learn. The exit code is 0 when 90 % of the test set are right.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from torchmpi_plugin import dist  # was: from composer.utils import dist


def prepare_data(cache: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set; whoever comes first on a node writes the cache."""
    file = cache / "digits.pt"
    with dist.run_local_rank_zero_first():
        if not file.exists():
            digits = load_digits()
            order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
            images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
            torch.save((images, torch.tensor(digits.target)[order]), file)
        images, labels = torch.load(file)
    return TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])


def average_gradients(model: nn.Module) -> None:
    """What DistributedDataParallel does, in the helpers' words."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, "SUM")
        parameter.grad /= dist.get_world_size()


def train(model: nn.Module, data: TensorDataset, epochs: int) -> float:
    """Train on this rank's share; the mean loss of the last epoch over all ranks."""
    sampler = dist.get_sampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = torch.zeros(1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        losses.zero_()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses += loss.detach() / len(loader)
    dist.all_reduce(losses)
    return losses.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset) -> float:
    """The share of right answers, each rank asking for every n-th sample."""
    images, labels = data[dist.get_global_rank() :: dist.get_world_size()]
    answers = dist.all_gather_object((model(images).argmax(dim=1) == labels).tolist())
    right = [answer for part in answers for answer in part]
    return sum(right) / len(right)


def main() -> int:
    """Train, test, save."""
    parser = argparse.ArgumentParser(description="Digits, with Composer's helpers.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", type=Path, help="directory for the cache and the checkpoint")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=300.0)
    names = [str(arguments.output or tempfile.mkdtemp())]
    dist.broadcast_object_list(names)
    output = Path(names[0])

    training, test = prepare_data(output)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    loss = train(model, training, arguments.epochs)
    accuracy = evaluate(model, test)
    if dist.get_global_rank() == 0:
        torch.save(model.state_dict(), output / "composer.pt")
        print(f"{dist.get_world_size()} ranks: loss {loss:.3f}, test accuracy {accuracy:.3f}, saved in {output}")
    dist.barrier()
    return 0 if accuracy >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
