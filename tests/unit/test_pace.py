"""Between nodes a node that receives nothing is never far ahead of those it sends to, and none waits for ever."""

import random

import numpy as np
import pytest
from ranks_in_one_process import DONE, Ranks

SLOTS, SLOT, CHUNKS = 4, 1024, 400
AHEAD = 4  # periods, of pipeline.c
#: Operations in which a node only sends, and the nodes of the ranks.
ONE_WAY = [
    ("broadcast", [0, 0, 1, 1]),
    ("broadcast", [0, 0, 1, 1, 2, 2]),
    ("reduce", [0, 0, 1, 1]),
    ("all_gather", [0, 1]),
    ("all_gather", [0, 1, 2]),
]


def most_that_waited(ranks, ops, dice):
    """Bring them to their end, while some ranks do not look for their messages; how many of data lay there for one."""
    most = 0
    while any(op and ranks.state(op) != DONE for op in ops):
        for comm in ranks.comms:
            ranks.lib.set_deaf(comm, dice.random() < 0.4)
        for _ in range(dice.choice((1, 5, 300))):
            ranks.state(next(filter(None, ops)))
        most = max(most, *(ranks.lib.waiting_messages(comm, 8) for comm in ranks.comms))
    for comm in ranks.comms:
        ranks.lib.set_deaf(comm, False)
        assert ranks.lib.waiting_messages(comm, -1) == 0
    ranks.release(ops)
    return most


def begin(ranks, operation, rank, ins, outs, how):
    source, target, size = ins[rank].ctypes.data, outs[rank].ctypes.data, ranks.size
    if operation == "broadcast":
        return ranks.broadcast(rank, target, ins[0].nbytes, 0)
    if operation == "reduce":
        return ranks.reduce("reduce", rank, ins[rank], outs[rank], how, [len(ins[0])])
    lengths = [ins[0].nbytes, *[0] * (size - 1)]
    return ranks.begin("allgather", ranks.groups[rank], input=source, outputs=[target] * size, output_sizes=lengths)


@pytest.mark.parametrize(("operation", "nodes"), ONE_WAY, ids=str)
def test_the_nodes_keep_pace(shim_of_all_ranks, operation, nodes):
    size, most = len(nodes), []
    for seed in range(8):
        ranks = Ranks(shim_of_all_ranks, size, SLOTS, SLOT, nodes)
        ins = [np.full(CHUNKS * SLOT // 4, rank + 1, np.float32) for rank in range(size)]
        outs = [one.copy() if operation == "broadcast" else np.zeros_like(one) for one in ins]
        how = ranks.reduction("F32")
        ops = [begin(ranks, operation, rank, ins, outs, how) for rank in range(size)]
        most.append(most_that_waited(ranks, ops, random.Random(seed)))
        results, value = (outs[:1], sum(range(1, size + 1))) if operation == "reduce" else (outs, 1)
        assert all((result == value).all() for result in results)
        ranks.close()
    assert SLOTS < max(most) < (AHEAD + 3) * SLOTS * max(1, AHEAD // max(nodes)), most
