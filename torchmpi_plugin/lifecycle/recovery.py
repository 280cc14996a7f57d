"""Going on without the ranks that died, where MPI can (ULFM: User Level Failure Mitigation)."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import torch_internals
from ..api.public import resolve
from ..group import world
from ..mpi import failures, runtime
from ..names import BACKEND
from ..options import Options
from ..tensors.arguments import check_timeout


def shrink(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a new group of the ranks of ``group`` that are still alive, and return it.

    To be called by every survivor of the group once an operation has raised RankFailedError; ranks that wait in an
    operation of the old group get an error from it. The new ranks count from 0 in the order of the old ones; what the
    dead ranks held is lost, so go on from a checkpoint. MPI is not finalised at the end of the program: Open MPI 5.0.11
    may wait there for the dead. Needs Open MPI 5 started with ``mpirun --with-ft ulfm``.

    Of the world: the old world and its groups are destroyed, the new one is ``torch.distributed``'s default group; any
    rank may be the dead one. Of a subgroup: only that group is destroyed; the world stays, without the dead, and with
    it the numbers of its ranks. A subgroup needs the store, which ends with the world's rank 0.

    Args:
        group: a group of the mpiplus backend; the world if None.
        timeout: how long to wait for the other survivors, and the new group's; the old group's if None.

    Raises:
        NotImplementedError: the MPI has no ULFM.
        DistBackendError: the other survivors did not come in time, or the store has ended.
    """
    old = resolve(group)
    runtime.refuse_in_forked_child("shrink")
    timeout = old.timeout if timeout is None else check_timeout("shrink", timeout)
    is_world = group is None or group is dist.group.WORLD  # not `old`, which may work below torch's own
    for each in world.groups() if is_world else [old]:
        failures.revoke(each.communicator.comm)
        each.abort()
    left = failures.without_the_dead(old.communicator.comm, timeout)
    runtime.leave_unfinalized()
    options = Options(comm=left)
    if is_world:
        dist.destroy_process_group()
        dist.init_process_group(BACKEND, init_method="mpi://", timeout=timeout, pg_options=options)
        return resolve(None)
    dist.destroy_process_group(group)
    return _subgroup(left, old.group_name, timeout, options)


def _subgroup(comm: Any, name: str, timeout: timedelta, options: Options) -> dist.ProcessGroup:
    """A group of the ranks of ``comm``, made by them alone.

    ``new_group(use_local_synchronization=True)`` would do, but that torch derives the group's name from how many groups
    this rank is in; the ranks then wait for each other under different names.
    """
    with runtime.exclusive():
        ranks = comm.allgather(dist.get_rank())
        name = comm.bcast(f"{name} shrunk {secrets.token_hex(4)}")
    return torch_internals.make_subgroup(BACKEND, ranks, comm.Get_rank(), name, options, timeout)
