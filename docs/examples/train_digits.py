"""Train a small network on handwritten digits with DistributedDataParallel.

    mpirun -n 4 python train_digits.py                  # on mpiplus
    mpirun -n 4 python train_digits.py --compare gloo   # then again on gloo
    mpirun -n 4 python train_digits.py --device cuda    # on GPUs, which ranks may share

Needs scikit-learn (for the data) and tqdm (for the progress bar). The batch size is that of all ranks together, so any
number of ranks trains the same way. The exit code is 0 when the test accuracy reaches 95 %, 1 when it does not.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

TARGET_ACCURACY = 0.95


@dataclass
class Result:
    """What one training run on one backend gave."""

    backend: str
    rank: int  # of this process
    ranks: int
    accuracy: float  # on the test set, 0..1
    speed: float  # training samples per second, over all ranks

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.backend}: {ranks}, test accuracy {100 * self.accuracy:.1f} %, {self.speed:,.0f} samples/s"


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: 8x8 images with values in 0..1, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train_rows, test_rows = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return TensorDataset(images[train_rows], labels[train_rows]), TensorDataset(images[test_rows], labels[test_rows])


def build_model() -> nn.Module:
    """Return a convolutional network for 8x8 images and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def choose_device(kind: str) -> torch.device:
    """Return this rank's device, and make it the current one."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def tally(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return [sum of losses, correct answers, samples] of one batch."""
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.tensor([loss.item() * len(labels), correct.item(), len(labels)], dtype=torch.float64)


def train_epoch(
    model: nn.Module, batches: DataLoader[tuple[Tensor, ...]], optimizer: torch.optim.Optimizer, device: torch.device
) -> Tensor:
    """Train on this rank's share of the data and return the tally of all ranks."""
    total = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        images, labels = (part.to(device) for part in batch)
        optimizer.zero_grad()
        logits = model(images)
        loss = cross_entropy(logits, labels)
        loss.backward()  # DistributedDataParallel averages the gradients over the ranks here
        optimizer.step()
        total += tally(loss, logits, labels)
    total = total.to(device)  # nccl takes no other tensors
    dist.all_reduce(total)
    return total


@torch.no_grad()
def evaluate(model: nn.Module, test_data: TensorDataset, device: torch.device) -> float:
    """Return the accuracy on the test set, which the ranks share out without overlap."""
    # A DistributedSampler repeats samples until all ranks have equally many; a stride counts every sample once.
    images, labels = (part.to(device) for part in test_data[dist.get_rank() :: dist.get_world_size()])
    correct = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return int(correct) / len(test_data)


def train(args: argparse.Namespace) -> Result:
    """Train and test one network in the current process group."""
    backend, rank, ranks = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    device = choose_device(args.device)
    torch.manual_seed(args.seed)
    train_data, test_data = load_data()
    sampler: DistributedSampler[int] = DistributedSampler(train_data, seed=args.seed)
    batches = DataLoader(train_data, batch_size=max(1, args.batch_size // ranks), sampler=sampler)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    speeds = []
    epochs = tqdm(range(args.epochs), desc=backend, unit="epoch", disable=rank != 0)
    for epoch in epochs:
        sampler.set_epoch(epoch)  # a new shuffle
        start = time.perf_counter()
        loss, correct, samples = train_epoch(model, batches, optimizer, device).tolist()
        speeds.append(samples / (time.perf_counter() - start))
        epochs.set_postfix(loss=f"{loss / samples:.4f}", accuracy=f"{correct / samples:.3f}")
    return Result(backend, rank, ranks, evaluate(model.module, test_data, device), statistics.median(speeds))


def train_on(backend: str, args: argparse.Namespace) -> Result:
    """Start `backend`, train on it, and end it."""
    dist.init_process_group(backend)
    result = train(args)  # in a function of its own: gloo may hang when a model outlives its process group
    dist.destroy_process_group()
    return result


def main() -> int:
    """Read the command line, train once or twice, and return the exit code."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DistributedDataParallel.")
    parser.add_argument("--backend", default="mpiplus", help="torch.distributed backend to train on (%(default)s)")
    parser.add_argument("--compare", metavar="BACKEND", help="train again on this backend and compare the speeds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (%(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training set (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step over all ranks (%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and shuffles (%(default)s)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA device here")

    torch.set_num_threads(1)  # the ranks already fill the cores
    results = [train_on(backend, args) for backend in (args.backend, args.compare) if backend]
    if results[0].rank == 0:
        print(*results, sep="\n")
    if args.compare and results[0].rank == 0:
        mine, other = results
        print(f"{mine.backend} trains {mine.speed / other.speed:.2f} times as fast as {other.backend}")
    return 0 if min(result.accuracy for result in results) >= TARGET_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
