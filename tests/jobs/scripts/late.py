"""Rank 1 is late in each step: by each way to wait one figure, which the flight recorder's times give as well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from steps import say
from torch.nn.parallel import DistributedDataParallel

import torchmpi_plugin
from torchmpi_plugin.diagnosis import flight_recorder

STEPS, LATE = 8, 0.1
#: How far the two may be apart: a rank may lose its core after its call, before others see that.
WITHIN = 0.3


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
    trace = flight_recorder.current.dump()
    mine = {row["collective_seq_id"]: row for row in trace["entries"] if row["process_group"][0] == group.group_name}
    found: list = [None] * ranks
    dist.all_gather_object(found, mine)
    return found


def waited_for_rank_1(group: dist.ProcessGroup) -> float:
    return torchmpi_plugin.statistics(group)["seconds_waited_for"].get(1, 0.0)


def main() -> None:
    dist.init_process_group("mpiplus")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {way: dist.new_group() for way in (call, work, future, callback, in_training)}
    steps = {way: in_training(group) if way is in_training else way for way, group in groups.items()}
    before = {group: (len(recorded(group, size)[rank]), waited_for_rank_1(group)) for group in groups.values()}
    for _ in range(STEPS):
        for way, group in groups.items():
            dist.barrier()
            if rank == 1:
                time.sleep(LATE)
            steps[way](group)
    for way, group in groups.items():
        of_ranks = [list(rows.values())[before[group][0] :] for rows in recorded(group, size)]
        for row in of_ranks[rank]:
            assert row["time_created_ns"] <= row["time_discovered_started_ns"] <= row["time_discovered_completed_ns"]
        times = zip(*([row["time_created_ns"] for row in rows] for rows in of_ranks), strict=True)
        waited = 1e-9 * sum(each[1] - each[rank] for each in times if each[1] == max(each))
        figures = torchmpi_plugin.statistics(group)
        if rank != 1:
            assert waited > 0.5 * STEPS * LATE, (way, waited)
            assert abs(waited_for_rank_1(group) - before[group][1] - waited) < WITHIN * waited, (way, waited, figures)
            assert figures["seconds_in_calls"] >= figures["seconds_waiting"] > (1 - WITHIN) * waited, figures
            name = f'mpiplus_seconds_waited_for_total{{group="{group.group_name}",rank="{rank}",late_rank="1"}}'
            assert name in torchmpi_plugin.prometheus(group), name
    dist.barrier()
    say("end")
    dist.destroy_process_group()


main()
