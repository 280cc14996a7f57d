"""Takes a step in each way of `mpiplus bench --train` on each group, and tells whether mpiplus had a part in it."""

import torch
import torch.distributed as dist
from steps import say

import torchmpi_plugin
from torchmpi_plugin.cli.bench.front_end import AloneGroup
from torchmpi_plugin.cli.bench.session import new_groups
from torchmpi_plugin.cli.bench.training.ways import WAYS, Place, planned

torch.set_num_threads(1)
groups = new_groups(("mpiplus", "gloo"), False)
first, alone = groups["mpiplus"], AloneGroup.of_all_ranks()
rank = dist.get_rank()


def calls() -> int:
    operations = torchmpi_plugin.statistics(first)["operations"]
    return sum(operation["calls"] for operation in operations.values())


for way in WAYS:
    (_, task, dtype), *_ = planned([way], quick=True, samples=2)
    places = {name: Place(task, getattr(torch, dtype), group, group) for name, group in groups.items()}
    places["alone"] = Place(task, getattr(torch, dtype), alone, first, alone=True)
    trainings = {name: way.make(place) for name, place in places.items()}
    for name, training in trainings.items():
        for _ in range(3):  # in the first ones DDP settles its buckets, on the group that it was made on
            training.step()
        before = calls()
        training.step()
        whose = "mpiplus" if calls() > before else "not mpiplus"
        say(f"rank {rank}: {way.name} on {name}: {whose}")
say("end")
dist.destroy_process_group()
