"""Groups made of others: torch's ``split_group``, ``shrink_group`` and ``merge_remote_group``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..communicator import membership
from ..diagnosis import comparison, monitor
from ..errors import DistBackendError
from ..mpi import failures, runtime
from ..store.checkin import CheckIn
from ..tensors.arguments import ArgumentError, check_timeout
from . import world
from .group import Group

_SHRINK_ABORT = 1  # torch's SHRINK_ABORT


def part(group: Group, store: dist.Store, ranks: list[int], name: str, timeout: timedelta | None) -> Any:
    """A new group of some of this group's ranks, in this order; None on a rank that is not among them.

    Args:
        store: the new group's own prefix of torch's store.
        ranks: ranks of this group.
        name: equal on all members, and new.
        timeout: how long to wait for the other members, and the new group's; this group's if None.

    Raises:
        ValueError: ranks that are not in the group, or named twice; a timeout that cannot be.
        DistBackendError: members that do not come in time.
    """
    runtime.refuse_without_mpi(f"splitting {group.label}")
    wrong = [rank for rank in ranks if not 0 <= rank < group.size()]
    if wrong or len({*ranks}) != len(ranks):
        raise ArgumentError(f"{group.label} has ranks 0 to {group.size() - 1}; they cannot be split as {ranks}")
    timeout = group.timeout if timeout is None else check_timeout(f"splitting {group.label}", timeout)
    group._splits += 1
    if group.rank() not in ranks:
        return None
    return _make_part(group, group.communicator.base, store, ranks, name, timeout)


def _make_part(group: Group, base: Any, store: dist.Store, ranks: list[int], name: str, timeout: timedelta) -> Any:
    rank, ranks_in_world = ranks.index(group.rank()), [group.global_rank(rank) for rank in ranks]
    return _make(group, base, store, rank, ranks_in_world, name, timeout)


def _make(
    group: Group, base: Any, store: dist.Store, rank: int, ranks: list[int], name: str, timeout: timedelta
) -> Any:
    config = group.communicator.config  # what its options asked for, as torch has it
    look = functools.partial(world.gone, ranks)
    comm, checkin = membership.create(base, store, name, rank, ranks, timeout, comparison.wanted(), config, look)
    made = group.plain_type(comm, checkin, store, name, ranks, timeout)
    made.known_as = group.known_as
    world.remember(made, name)
    if group.attach is not None:
        group.attach(made)
    return made


def split_group(
    group: Group,
    new_ranks: list[int],
    timeout: timedelta | None = None,
    opts: Any = None,
    group_name: str | None = None,
    group_desc: str | None = None,
    device_types: list[torch.device] | None = None,
) -> Any:
    """:func:`part` as ``torch.distributed.split_group`` calls it; all tensors' devices stay."""
    name = group_name or f"{group.group_name}:split:{group._splits}"
    made = part(group, dist.PrefixStore(f"{name}/", group._store), new_ranks, name, timeout)
    if made is not None:
        made.setGroupDesc(group_desc or f"{group.group_desc}:split:{group._splits}")
    return made


def merge_remote_group(
    group: Group,
    store: dist.Store,
    size: int,
    timeout: timedelta = default_pg_timeout,
    group_name: str | None = None,
    group_desc: str | None = None,
) -> Any:
    """A new group of ``size`` processes of this job, each of which calls this on a group of its own.

    Args:
        store: the same for all. It counts who comes, which gives the ranks, as with torch's backends.
        timeout: how long to wait for the others, and the new group's.

    Raises:
        ValueError: less than one process; a timeout that cannot be.
        DistBackendError: processes that do not come in time, come twice, or that another mpirun has started.
    """
    doing = f"merging {group.label}"
    runtime.refuse_without_mpi(doing)
    check_timeout(doing, timeout)
    if size < 1:
        raise ArgumentError(f"{doing}: the size must be 1 or more, not {size}")
    assert world.checkin is not None
    turn, rank = divmod(store.add(f"mpiplus/merging {size}", 1) - 1, size)
    store = dist.PrefixStore(f"merged {size} {turn}/", store)
    checkin = CheckIn(store, "merge", rank, size)
    mine = [world.checkin.name, group.global_rank(group.rank()), group_name or f"{group.group_name}:merge"]
    jobs, ranks, names = zip(*map(json.loads, checkin.gather("member", json.dumps(mine), timeout, doing)), strict=True)
    if len({*jobs}) > 1:
        raise DistBackendError(f"{doing}: its {size} processes are of {len({*jobs})} MPI jobs, not of one")
    made = _make(group, world.base(), store, rank, [*ranks], names[0], timeout)
    checkin.forget("member")  # all have read it: they were needed to make the group
    made.setGroupDesc(group_desc or f"{group.group_desc}:merge")
    return made


#: What torch's process group leaves to its backend in C++.
LEFT_TO_BACKENDS = (
    *("_enable_collectives_timing", "_register_on_completion_hook", "_wait_for_pending_works"),
    *("get_reconfigure_handle", "reconfigure", "use_pg_for_symm_mem_rendezvous"),
)


def refusal(name: str) -> Callable[..., Any]:
    """A method of torch's for which there is nothing in mpiplus: gloo's raises a RuntimeError as well."""

    def refuse(group: Group, *_: Any, **__: Any) -> Any:
        runtime.refuse_in_forked_child(name)
        raise NotImplementedError(f"{name}: {group.label} is of mpiplus, which does not support it")

    return refuse


def shrink(group: Group, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
    """The other ranks as a backend, for ``torch.distributed.shrink_group``, which makes a group of it.

    Args:
        ranks_to_exclude: ranks of this group, dead or alive; they do not call this.
        shrink_flags: torch's SHRINK_ABORT: first end what this rank waits for in the group.

    Raises:
        NotImplementedError: a torch before 2.15, or an MPI without ULFM.
        DistBackendError: the other ranks did not come in time, or more ranks have died than were excluded.
    """
    runtime.refuse_without_mpi("shrink")
    if not group.supports_shrinking:
        raise NotImplementedError("shrink_group on mpiplus needs torch 2.15 and an MPI with ULFM (docs/usage.md)")
    if shrink_flags & _SHRINK_ABORT:
        group.abort()
    stay = [rank for rank in range(group.size()) if rank not in ranks_to_exclude]
    base, dead = group.communicator.base, failures.failed_ranks(group.communicator.comm, listen=True)
    if {*dead} - {*ranks_to_exclude}:
        raise DistBackendError(f"shrink: ranks {dead} of {group.label} have died; exclude all of them")
    if dead:
        base = failures.without_the_dead(group.communicator.comm, group.timeout)
    group._splits += 1
    name = f"{group.group_name} shrunk {group._splits}"
    store = dist.PrefixStore(f"{name}/", group._store)
    made = _make_part(group, base, store, stay, name, group.timeout)
    if monitor.answers_for(group):
        world.adopt(made)
    assert group.as_backend is not None
    return group.as_backend(made)
