"""A command of mpiplus, or `follow`, on ranks that believe to be on nodes: believing.py 0,1 bench --tune.

`follow` makes a world and says whose collectives it has.
"""

import os
import sys

import torch.distributed as dist
from mpi4py import MPI

from torchmpi_plugin.cli import main
from torchmpi_plugin.node import node

hosts, *words = sys.argv[1:]
here = hosts.split(",")[MPI.COMM_WORLD.rank]
node.identity = lambda: f"node {here}"

if words == ["follow"]:
    dist.init_process_group("mpiplus")
    communicator = dist.group.WORLD.communicator
    whose = "own" if communicator.choice.own_for_all else "both" if communicator.choice.own else "mpi"
    os.write(1, f"follow: rank {dist.get_rank()} {whose}\n".encode())
    dist.destroy_process_group()
else:
    main(words)
