"""Ranks that call different things get an error each, whoever moves the data: disagreeing.py HOSTS.

HOSTS: on how many nodes the ranks believe to be. 0: on the one where they are.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from mpi4py import MPI

from torchmpi_plugin.node import node

torch.set_num_threads(1)
hosts, me, size = int(sys.argv[1]), MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
if hosts:
    node.identity = lambda: f"node {me % hosts}"
odd = me == 1
dist.init_process_group("mpiplus")
blocks = [torch.zeros(2) for _ in range(size)]
calls: dict[str, Callable[[], object]] = {
    "lengths": lambda: dist.all_reduce(torch.ones(8 if odd else 4)),
    "dtypes": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
    "reductions": lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
    "roots": lambda: dist.broadcast(torch.ones(4), 1 if odd else 0),
    "operations": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(4)),
    "waits": lambda: dist.scatter(torch.ones(1), [torch.ones(1)] * size) if me == 0 else dist.all_reduce(torch.ones(4)),
    "long ones": lambda: dist.all_reduce(torch.ones((1 << 18) + odd)),
    "blocks": lambda: dist.reduce_scatter_tensor(torch.ones(2 + odd), torch.ones((2 + odd) * size)),
    "gathered": lambda: dist.all_gather_into_tensor(torch.ones((2 + odd) * size), torch.ones(2 + odd)),
    "asynchronous ones": lambda: dist.reduce(torch.ones(4), 1 if odd else 0, async_op=True).wait(),
}
for name, call in calls.items():
    try:
        call()
    except dist.DistBackendError as error:
        assert "disagree" in str(error), error
        assert "the group can be used again" in str(error), error
    else:
        raise AssertionError(f"different {name}: rank {me} was not told")
    total = torch.full((5,), float(me))
    dist.all_reduce(total)
    assert total.tolist() == [size * (size - 1) / 2] * 5, (name, total)
pending = [dist.all_reduce(torch.full((3,), float(number)), async_op=True) for number in range(5)]
dist.all_gather(blocks, torch.full((2,), float(me)))
assert [block[0].item() for block in blocks] == list(range(size))
for number, work in enumerate(pending):
    work.wait()
    assert work.result()[0].tolist() == [float(number * size)] * 3
communicator = dist.group.WORLD.communicator
whose = "own" if communicator.choice.own_for_all else "both" if communicator.choice.own else "mpi"
os.write(1, f"told: rank {me} of {len(calls)}, {whose}\n".encode())
dist.destroy_process_group()
