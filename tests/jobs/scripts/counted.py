"""Operations whose figures are known, with rank 1 late in each round."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from steps import raises, say

import torchmpi_plugin

ROUNDS, LATE = 5, 0.2

dist.init_process_group("mpiplus")
rank = dist.get_rank()
group = dist.new_group()
for _ in range(ROUNDS):
    if rank == 1:
        time.sleep(LATE)
    dist.all_reduce(torch.ones(1000))
    if rank == 1:
        time.sleep(LATE)
    dist.all_to_all_single(torch.empty(3), torch.ones(3))
dist.broadcast(torch.ones(3, dtype=torch.int64), src=2, group=group)
if rank == 0:
    dist.send(torch.ones(5), 2)
elif rank == 2:
    dist.recv(torch.ones(5), 0)
found = torchmpi_plugin.statistics()
hand_overs = {name: one.pop("hand_overs") for name, one in found["operations"].items()}
assert found["operations"]["all_reduce"] == {"calls": ROUNDS, "bytes": 4000 * ROUNDS}, found
broadcast = torchmpi_plugin.statistics(group)["operations"].pop("broadcast")
assert broadcast.pop("hand_overs") >= 0 and broadcast == {"calls": 1, "bytes": 24}, broadcast
messages = {0: "send", 2: "recv"}
for name in ("send", "recv"):
    wanted = {"calls": 1, "bytes": 20} if messages.get(rank) == name else None
    assert found["operations"].get(name) == wanted, found
assert f'mpiplus_calls_total{{group="0",rank="{rank}",operation="all_reduce"}} {ROUNDS}' in torchmpi_plugin.prometheus()
if rank != 1:  # asleep in each wait, for most of the time that rank 1 has slept, whatever else the machine does
    assert hand_overs["all_reduce"] >= ROUNDS, hand_overs
    assert found["seconds_waited_for"][1] > 1.5 * ROUNDS * LATE, found
    assert found["seconds_in_calls"] >= found["seconds_waiting"] > 1.5 * ROUNDS * LATE, found
with raises(TypeError):  # a group of another kind
    torchmpi_plugin.statistics("a group")
dist.barrier()
print(json.dumps(found))
say("end")
if "stay" not in sys.argv:
    dist.destroy_process_group()
