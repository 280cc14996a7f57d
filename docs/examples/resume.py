"""Training that goes on after a rank has died, from the last checkpoint: all ranks start again, or the others go on.

    mpiplus run -n 2 --max-restarts 2 resume.py --kill 1                # DistributedDataParallel
    mpiplus run -n 3 resume.py --fsdp --kill 1                          # FSDP2: ends with rank 1 ...
    mpiplus run -n 2 resume.py --fsdp                                   # ... and goes on with one rank fewer
    mpiplus run -n 3 --mpi-args "--with-ft ulfm" resume.py --survive --kill 1    # without a restart: Open MPI 5

Checkpoints are written by torch.distributed.checkpoint while the training goes on. One that a rank's death has cut
short has no .metadata, which is written last, and is passed over. Rank 0 prints the loss of each step to the bit.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchmpi_plugin

STEPS, EVERY, BATCH = 30, 5, 24


class Saver:
    """Saves in the background. Its group is its own: the training's operations must not come between."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.group = dist.new_group()
        self.pending = None

    def save(self, step: int, state: dict) -> None:
        self.wait()
        target = self.directory / f"step-{step}"
        self.pending = checkpoint.async_save(state, checkpoint_id=target, process_group=self.group)

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()

    def last(self) -> Path | None:
        """The newest that is complete; rank 0's word, as others may look at another moment."""
        steps = [int(path.parent.name.removeprefix("step-")) for path in self.directory.glob("step-*/.metadata")]
        found = [max(steps, default=None)]
        dist.broadcast_object_list(found, src=0)
        return None if found[0] is None else self.directory / f"step-{found[0]}"


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a step's samples, which depend on nothing but the step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 16, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine], targets[mine]


def build(fsdp: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 1))
    return fully_shard(model) if fsdp else DistributedDataParallel(model)


def train(options: argparse.Namespace) -> None:
    model = build(options.fsdp)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saver, step = Saver(options.directory), 0
    if (last := saver.last()) is not None:
        state = state_of(model, optimizer, 0)
        checkpoint.load(state, checkpoint_id=last, process_group=saver.group)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks begin at step {step}, at {time.time():.3f}", flush=True)
    while step < STEPS:
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        step += 1
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.6f} {mean.item().hex()}", flush=True)
        if step % EVERY == 0:
            saver.save(step, state_of(model, optimizer, step))
        if first and dist.get_rank() == options.kill and step == options.at:
            print(f"dies at {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    saver.wait()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"))
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the ranks")
    parser.add_argument("--kill", type=int, default=-1, help="the rank that kills itself, unless it was started again")
    parser.add_argument("--survive", action="store_true", help="go on without ranks that have died; needs ULFM")
    parser.add_argument("--at", type=int, default=18, help="after how many steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("mpiplus")
    while True:
        try:
            train(options)
            break
        except RuntimeError as error:  # a RankFailedError; out of DDP's reducer, which is C++, only its text comes
            if not options.survive or "RankFailedError" not in repr(error):
                raise
            print(f"goes on after {error}", flush=True)
            torchmpi_plugin.shrink()  # a new world of those that are left; model, optimizer and groups are made again
            options.kill = -1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
