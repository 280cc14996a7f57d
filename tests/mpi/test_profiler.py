"""torch's profiler shows our operations."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import GROUP_TIMEOUT
from torch.autograd.profiler import profile
from trace_rules import check_slices

from torchmpi_plugin.api.public import resolve
from torchmpi_plugin.engine import profiling


def test_events_of_operations(world) -> None:
    small, large = torch.ones(4), torch.ones(1 << 20)
    with profile() as profiler:
        for _ in range(3):
            dist.all_reduce(small)
        pending = dist.all_reduce(large, async_op=True)
        if world.size > 1:
            sent = dist.isend(small, (world.rank + 1) % world.size)
            dist.recv(torch.empty(4), (world.rank - 1) % world.size)
            sent.wait()
        with pytest.raises(ValueError, match="dense"):
            dist.all_reduce(torch.ones(4).to_mkldnn())
        dist.barrier()
        pending.wait()
        pending.get_future().then(lambda done: None).wait()  # the event ends in a callback before this one
    counts = Counter(event.name for event in profiler.function_events or () if event.name.startswith("mpiplus:"))
    expected = {"mpiplus:all_reduce": 4, "mpiplus:barrier": 1}
    if world.size > 1:
        expected |= {"mpiplus:send": 1, "mpiplus:recv": 1}
    assert counts == expected
    assert not profiling.events
    assert large[0] == world.size


def gloos_events(group: Any, rank: int, size: int) -> list[tuple[Any, ...]]:
    mine, parts = torch.ones(3, 4), [torch.empty(3, 4) for _ in range(size)]
    with profile(record_shapes=True) as profiler:
        dist.all_reduce(mine, group=group)
        dist.all_reduce(mine, group=group, async_op=True).wait()
        dist.broadcast(mine, 0, group=group)
        dist.all_gather(parts, mine, group=group)
        dist.gather(mine, parts if rank == 0 else None, 0, group=group)
        dist.scatter(mine, parts if rank == 0 else None, 0, group=group)
        dist.all_reduce_coalesced([mine, mine + 1], group=group)
        dist.all_gather_coalesced([[torch.empty(3, 4)] * 2 for _ in range(size)], [mine, mine + 1], group=group)
        dist.all_to_all_single(torch.empty(size, 4), torch.ones(size, 4), group=group)
        if rank == 0:
            dist.send(mine, 1, group=group, tag=3)
            dist.recv(mine, group=group)
        elif rank == 1:
            dist.recv(mine, 0, group=group, tag=3)
            dist.send(mine, 0, group=group)
        dist.barrier(group)
    return [
        (event.name, event.is_async, event.count, event.input_shapes)
        for event in profiler.function_events or ()
        if event.name.startswith("gloo:")
    ]


@pytest.mark.mpi(min_size=2)
def test_events_in_another_backends_name(world) -> None:
    """As MPIPLUS_REPLACE has it: what a program finds of that backend it finds of ours."""
    gloo, ours = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT), dist.new_group()
    resolve(ours).known_as = "gloo"
    assert gloos_events(ours, world.rank, world.size) == gloos_events(gloo, world.rank, world.size)
    for group in (gloo, ours):
        dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_operations_that_outlive_the_profiler(world) -> None:
    """Their events end with it, and what torch then frees is not written to when they complete."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for _ in range(5):
        with profile() as profiler:
            works = [dist.irecv(torch.empty(1), left) for _ in range(40)]
        others = [{number: [number]} for number in range(20_000)]  # where the events were
        for work in [dist.isend(torch.ones(1), right) for _ in works] + works:
            work.wait()
        dist.barrier()
        assert all(other == {number: [number]} for number, other in enumerate(others))
        assert [event.name for event in profiler.function_events or ()].count("mpiplus:recv") == len(works)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlapping", [3, 0])
def test_no_event_overlaps_another_partly(world, tmp_path, overlapping: int) -> None:
    """Asynchronous operations, of DDP's too, are on tracks of their own; all have sizes, dtype and ranks."""
    layers = [torch.nn.Linear(100, 100) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
    large, file = torch.ones(1 << 20), tmp_path / f"{world.rank}.json"
    for _ in range(2):  # DDP makes its buckets anew after the first step
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            if overlapping:
                model(torch.ones(4, 100)).sum().backward()
            time.sleep(0.1 * (world.rank == 1))  # so that rank 0's are under way when the function has ended
            with torch.profiler.record_function("begins"):
                works = [dist.all_reduce(large, async_op=True) for _ in range(overlapping)]
            dist.all_reduce(torch.ones(2))
            torch.mm(torch.ones(200, 200), torch.ones(200, 200))
            for work in works:
                work.wait()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    check_slices([event for event in events if event.get("cat") in ("user_annotation", "cpu_op")])
    ours = [event for event in events if event["name"] == "mpiplus:all_reduce"]
    moved = [event for event in ours if event["tid"] >= 2_000_000_000]
    assert len(ours) >= (6 if overlapping else 1) and (moved or world.rank != 0 or not overlapping)
    for told in [event["args"] for event in ours]:
        assert (told["dtype"], told["Process Group Ranks"]) == ("Float", str([*range(world.size)])), told
        assert told["In msg nelems"] > 0, told
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert all(tracks[event["tid"]].startswith("mpiplus, asynchronous") for event in moved)


CALLS = {
    "allreduce_": lambda mine, _: dist.all_reduce(mine),
    "broadcast_": lambda mine, _: dist.broadcast(mine, 0),
    "_allgather_base_": lambda mine, all_of_them: dist.all_gather_into_tensor(all_of_them, mine),
    "barrier": lambda *_: dist.barrier(),
}


def calls_traced(file: Path) -> list[dict[str, Any]]:
    """The arguments of c10d's operators in the file that a viewer reads, by their names, in the order of the calls."""
    mine = torch.ones(6, 4, dtype=torch.bfloat16)
    gathered = torch.empty(6 * dist.get_world_size(), 4, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for call in CALLS.values():
            call(mine, gathered)
        dist.all_reduce(mine, async_op=True).wait()
    profiler.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"].startswith("c10d::")]
    assert {event["cat"] for event in events} == {"cpu_op"}
    return [{"name": event["name"], **event["args"]} for event in sorted(events, key=lambda event: event["ts"])]


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trace_tools_see_communication(world, tmp_path) -> None:
    """The operators that they see of other backends, with tensors; and sizes and dtypes in NCCL's words."""
    ours = calls_traced(tmp_path / f"{world.rank}.json")
    assert [event["name"] for event in ours] == [f"c10d::{name}" for name in (*CALLS, "allreduce_")]
    assert all("[6, 4]" in str(event["Input Dims"]) for event in ours if "barrier" not in event["name"])
    assert {
        "Collective name": "allreduce",
        "dtype": "BFloat16",
        "In msg nelems": 24,
        "Out msg nelems": 24,
        "Group size": world.size,
        "Process Group Name": dist.group.WORLD.group_name,
        "Process Group Ranks": str(list(range(world.size))),
    }.items() <= ours[0].items()
    assert ours[2]["Out msg nelems"] == 24 * world.size
