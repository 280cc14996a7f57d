"""A rank that waits for a late one sleeps between its looks, whatever it waits in: the core is for who computes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

SECONDS_LATE = 0.5
#: It may pause 50 times as often; those of a crowded machine take longer.
FEWEST_PAUSES = 20
#: Of a core. It was nine tenths where a look into MPI that took its time counted as work of MPI's.
LARGEST_SHARE = 0.4


def calls(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """What each rank calls; rank 0 late. The last rank waits for it in all of them."""
    one, many = torch.ones(3), torch.ones(size)
    last = size - 1
    to_last = (lambda: dist.send(one, last)) if rank == 0 else (lambda: dist.recv(one, 0))
    return {
        "recv": to_last if rank in (0, last) else lambda: None,
        "irecv": to_last if rank == 0 else lambda: dist.irecv(one, 0).wait() if rank == last else None,
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(size), many),
        "gather": lambda: dist.gather(one, [torch.empty(3) for _ in range(size)] if rank == last else None, dst=last),
        "all_reduce": lambda: dist.all_reduce(one),
        "barrier": dist.barrier,
    }


def share_and_pauses(call: Callable[[], object]) -> tuple[float, int]:
    """Of a core while this thread is in the call, and how often it lets go of the core."""
    before, begin = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic()
    call()
    after, waited = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic() - begin
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return busy / waited, after.ru_nvcsw - before.ru_nvcsw


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", calls(0, 2))
def test_who_waits_leaves_the_core(world, name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    measured = []
    for _ in range(2):
        dist.barrier()
        if rank == 0:
            time.sleep(SECONDS_LATE)
        measured.append(share_and_pauses(calls(rank, size)[name]))
    if rank == size - 1:
        assert any(share <= LARGEST_SHARE and pauses >= FEWEST_PAUSES for share, pauses in measured), measured
