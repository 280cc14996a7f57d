"""torch's profiler shows our operations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

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
        with pytest.raises(ValueError, match="meta"):
            dist.all_reduce(torch.ones(4, device="meta"))
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


def test_no_events_without_a_profiler(world) -> None:
    dist.all_reduce(torch.ones(4))
    assert not profiling.events
