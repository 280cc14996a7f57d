"""Rank 1 is late in each step, as seen by each way to wait: one figure, which the flight recorder's times give as well.

The ways take turns, so that what else the machine does meets all of them. A rank that loses its core after its call,
and before others see that, is waited for longer than the times say: one of several parts is to be without that.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from steps import say
from torch.nn.parallel import DistributedDataParallel

import torchmpi_plugin
from torchmpi_plugin.diagnosis import flight_recorder
from torchmpi_plugin.engine import engine

PARTS, LATE = 5, 0.02
STEPS = PARTS * (6 if "nodes" in sys.argv else 20)
#: How far the figures may be apart, and times: of another node's rank a message tells, when it is looked at.
WITHIN, WITHIN_NS = (0.05, 1e6)
if "nodes" in sys.argv:
    WITHIN, WITHIN_NS = 0.3, 2e7 * float(os.environ.get("MPIPLUS_TEST_PATIENCE", "1"))


def call(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1000), group=group)


def work(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()


def future(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1000), group=group, async_op=True).get_future().wait()


def callback(group: dist.ProcessGroup) -> None:
    is_over = threading.Event()
    pending = dist.all_reduce(torch.ones(1000), group=group, async_op=True).get_future()
    then = pending.then(lambda _: is_over.set())
    is_over.wait()
    then.wait()


def in_training(group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup], None]:
    model = DistributedDataParallel(torch.nn.Linear(10, 10), process_group=group)

    def step(_: dist.ProcessGroup) -> None:
        model(torch.ones(2, 10)).sum().backward()

    return step


def recorded(group: dist.ProcessGroup, ranks: int) -> list[dict]:
    """What the flight recorders of all ranks have of a group, by rank: times by the collective's number."""
    trace = pickle.loads(flight_recorder.current.dump())
    mine = {row["collective_seq_id"]: row for row in trace["entries"] if row["process_group"][0] == group.group_name}
    found: list = [None] * ranks
    dist.all_gather_object(found, mine)
    return found


def main() -> None:
    dist.init_process_group("mpiplus")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {way: dist.new_group() for way in (call, work, future, callback, in_training)}
    steps = {way: in_training(group) if way is in_training else way for way, group in groups.items()}
    marks: dict = {way: [] for way in groups}
    for step in range(STEPS + 1):
        for way, group in groups.items() if step % (STEPS // PARTS) == 0 else ():
            waited_for = torchmpi_plugin.statistics(group)["seconds_waited_for"].get(1, 0)
            marks[way].append((len(recorded(group, size)[0]), waited_for))
        if step == STEPS:
            break
        for way, group in groups.items():
            dist.barrier()
            if rank == 1:
                time.sleep(LATE)
            steps[way](group)
    for way, group in groups.items():
        of_ranks = recorded(group, size)
        (first, _), *_ = marks[way]
        assert len(of_ranks[0]) >= first + STEPS, (way, len(of_ranks[0]))
        numbers = sorted(of_ranks[0])[first:]
        times = [[one[number]["time_created_ns"] for number in numbers] for one in of_ranks]
        for mine, *others in zip(times[rank], *times, strict=True):
            assert mine <= max(others)
        apart = []
        for number in numbers:
            row = of_ranks[rank][number]
            last = max(one[number]["time_created_ns"] for one in of_ranks)
            apart.append(abs(row["time_discovered_started_ns"] - last))
            assert row["time_created_ns"] <= row["time_discovered_started_ns"] <= row["time_discovered_completed_ns"]
        # A thread that loses its core between two looks at the clock is further apart.
        assert sum(each < WITHIN_NS for each in apart) > 0.8 * len(apart), (way, apart)
        waits = [1e-9 * max(0, late - mine) for mine, late in zip(times[rank], times[1], strict=True)]
        oracle, figures = sum(waits), torchmpi_plugin.statistics(group)
        if rank != 1:
            assert oracle > 0.9 * STEPS * LATE, oracle
            parts = [
                (until - since, sum(waits[begin - first : end - first]))
                for (begin, since), (end, until) in itertools.pairwise(marks[way])
            ]
            assert any(abs(mine - theirs) < WITHIN * theirs for mine, theirs in parts), (way, parts)
            assert figures["seconds_in_calls"] >= figures["seconds_waiting"] > 0.9 * oracle, figures
            name = f'mpiplus_seconds_waited_for_total{{group="{group.group_name}",rank="{rank}",late_rank="1"}}'
            assert name in torchmpi_plugin.prometheus(group), name
    time.sleep(0.1)
    of_group = next(
        one for one in json.loads(engine.status_text())["groups"] if one["name"] == groups[in_training].group_name
    )
    assert of_group["begun_ago"] >= of_group["ended_ago"] >= 0.1, of_group  # whoever has waited
    dist.barrier()
    say("end")
    dist.destroy_process_group()


main()
