"""A training script written for Axolotl's `axolotl.utils.distributed`; only the imports and the start are others.

    mpirun -n 4 python helpers_axolotl.py

Rank zero prepares the data while the others wait, the number of steps is computed once and shared, every rank's
evaluation is gathered, the loss is reduced and shared, and rank zero writes the checkpoint. Needs scikit-learn.
The exit code is 0 when 90 % of the test set are right.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torchmpi_plugin.dist import (  # was: from axolotl.utils.distributed import (
    barrier,
    compute_and_broadcast,
    gather_scalar_from_all_ranks,
    get_global_rank,
    get_world_size,
    initialize_dist,
    is_distributed,
    is_main_process,
    reduce_and_broadcast,
    zero_first,
    zero_only,
)

BATCH = 64


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


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> float:
    """Train for ``steps`` batches of all ranks; the mean loss over ranks and the last ten steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    order = torch.Generator().manual_seed(0)  # the same on every rank
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,), generator=order)[get_global_rank() :: get_world_size()]
        optimizer.zero_grad()
        loss = cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return reduce_and_broadcast(lambda: sum(losses[-10:]) / 10, lambda values: sum(values) / len(values))


@zero_only()
def save(model: nn.Module, file: Path) -> None:
    """The checkpoint, by rank zero only."""
    torch.save(model.state_dict(), file)


def main() -> int:
    """Train, test, save."""
    parser = argparse.ArgumentParser(description="Digits, with Axolotl's helpers.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", type=Path, help="directory for the cache and the checkpoint")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    initialize_dist()  # was: init_distributed_state()
    output = compute_and_broadcast(lambda: arguments.output or Path(tempfile.mkdtemp()))
    images, labels = prepare_data(output)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trained = DistributedDataParallel(model) if is_distributed() else model
    steps = compute_and_broadcast(lambda: arguments.epochs * (1440 // BATCH))
    loss = train(trained, images[:1440], labels[:1440], steps)

    mine = slice(1440 + get_global_rank(), None, get_world_size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum().item()
    gathered = gather_scalar_from_all_ranks(lambda: right, world_size=get_world_size())
    accuracy = compute_and_broadcast(lambda: sum(gathered) / len(images[1440:]))
    save(model, output / "axolotl.pt")
    with zero_only() as main_process:
        if main_process:
            print(f"{get_world_size()} ranks: loss {loss:.3f}, test accuracy {accuracy:.3f}, saved in {output}")
    barrier()
    return 0 if accuracy >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
