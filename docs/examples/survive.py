"""Training that goes on when a rank dies: Open MPI 5 only, started with ULFM.

    mpirun --with-ft ulfm -n 4 python docs/examples/survive.py --kill 2

Rank 2 kills itself in the middle. The others get RankFailedError from the operation that waits for it, make a
world of those that are left, and go on from the last checkpoint. With another --kill, that rank of the new world
dies too.
"""

import argparse
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import torchmpi_plugin

STEPS, EVERY = 60, 10


def gradients(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean gradient over all ranks, as one vector; each rank takes every n-th sample."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    return flat


def apply(model: torch.nn.Module, flat: torch.Tensor, rate: float = 0.5) -> None:
    with torch.no_grad():
        parameters = list(model.parameters())
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.sub_(rate * part.view_as(parameter))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, action="append", default=[], help="the rank that kills itself")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = torch.nn.Linear(64, 10)
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    victims = iter(options.kill)
    victim = next(victims, -1)
    step, checkpoint = 0, (0, {name: value.clone() for name, value in model.state_dict().items()})
    while step < STEPS:
        if dist.get_rank() == victim and step == STEPS // 2 + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            apply(model, gradients(model, images, labels))
            step += 1
        except torchmpi_plugin.RankFailedError as error:
            print(f"step {step}: {error}", flush=True)
            torchmpi_plugin.shrink()
            victim = next(victims, -1)
            step = checkpoint[0]
            model.load_state_dict(checkpoint[1])
            print(f"rank {dist.get_rank()} of {dist.get_world_size()} goes on from step {step}", flush=True)
        if step % EVERY == 0:
            checkpoint = (step, {name: value.clone() for name, value in model.state_dict().items()})
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
