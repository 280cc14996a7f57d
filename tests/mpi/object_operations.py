"""The object collectives and the barriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from cases import Case
from point_to_point import neighbours
from started import Started, works_of

NESTED = {"none": None, "pi": 3.14159, "text": "größer", "set": {1, 2, 3}}


def thing(case: Case, rank: int, slot: int = 0) -> dict[str, Any]:
    """Something picklable that is of another size on every rank."""
    return {**NESTED, "rank": rank, "slot": slot, "bytes": bytes(range(200)) * rank, "of": case.size}


def things(case: Case) -> list[Any]:
    return [thing(case, rank) for rank in range(case.size)]


def compared(got: Any, wanted: Any) -> Started:
    def check() -> Iterator[str]:
        if got != wanted:
            yield f"got {got!r:.200}, not {wanted!r:.200}"

    return Started(check=check)


def broadcast_object_list(case: Case) -> Started:
    wanted = [thing(case, case.root, 0), "second", thing(case, case.root, 2)]
    objects = list(wanted) if case.rank == case.root else [None] * 3
    dist.broadcast_object_list(objects, src=case.global_root, group=case.process_group)
    return compared(objects, wanted)


def all_gather_object(case: Case) -> Started:
    objects: list[Any] = [None] * case.size
    dist.all_gather_object(objects, thing(case, case.rank), group=case.process_group)
    return compared(objects, things(case))


def gather_object(case: Case) -> Started:
    mine = case.rank == case.root
    objects = [None] * case.size if mine else None
    dist.gather_object(thing(case, case.rank), objects, dst=case.global_root, group=case.process_group)
    return compared(objects, things(case) if mine else None)


def scatter_object_list(case: Case) -> Started:
    output: list[Any] = [None]
    given = things(case) if case.rank == case.root else None
    dist.scatter_object_list(output, given, src=case.global_root, group=case.process_group)
    return compared(output, [thing(case, case.rank)])


def send_recv_object_list(case: Case) -> Started:
    """Once round the ring; each rank but the first passes on after it has received."""
    before, after = neighbours(case)
    given = [thing(case, case.rank), case.rank]
    received: list[Any] = [None, None]
    group, ranks = case.process_group, case.group.ranks
    if case.rank == 0:
        dist.send_object_list(given, ranks[after], group=group)
        dist.recv_object_list(received, ranks[before], group=group)
    else:
        dist.recv_object_list(received, ranks[before], group=group)
        dist.send_object_list(given, ranks[after], group=group)
    return compared(received, [thing(case, before), before])


def barrier(case: Case) -> Started:
    return Started(other_works=works_of(dist.barrier(group=case.process_group, async_op=case.is_async)))


def monitored_barrier(case: Case) -> Started:
    import torchmpi_plugin

    torchmpi_plugin.monitored_barrier(case.process_group)
    return Started()
