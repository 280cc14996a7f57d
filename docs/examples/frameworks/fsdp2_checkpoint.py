"""FSDP2 with a distributed checkpoint, and on from there: mpirun -n 2 python fsdp2_checkpoint.py

Three steps, a checkpoint, three more; then a new model takes the checkpoint and must come to the same loss.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


dist.init_process_group(BACKEND)
if torch.cuda.is_available():  # fully_shard takes it then, so all else must be there
    torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    torch.set_default_device("cuda")
directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(directory)

model, optimizer = sharded(seed=1)
losses = train(model, optimizer, range(12))
dcp.save(state_of(model, optimizer), checkpoint_id=directory[0])
losses += train(model, optimizer, range(12, 24))

model, optimizer = sharded(seed=2)
state = state_of(model, optimizer)
dcp.load(state, checkpoint_id=directory[0])
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
resumed = train(model, optimizer, range(12, 24))
assert resumed == losses[12:], (resumed, losses[12:])
if dist.get_rank() == 0:
    print(
        f"fsdp2 on {dist.get_backend()}, {dist.get_world_size()} ranks: loss {losses[0]:.6f} to {losses[-1]:.6f}, "
        f"and the same from the checkpoint"
    )
dist.destroy_process_group()
