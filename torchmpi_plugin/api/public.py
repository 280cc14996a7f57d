"""Public functions on groups that torch's interface has no place for."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..group import statistics as counted
from ..group import world
from ..group.process_group import OWN, ProcessGroupMPI
from ..mpi import failures, runtime
from ..names import BACKEND
from ..options import Options
from ..tensors.arguments import ArgumentError, ArgumentTypeError, check_timeout
from ..tensors.dtypes import AVG, kind_of
from .backend import group_of


def resolve(group: dist.ProcessGroup | None) -> ProcessGroupMPI:
    """The group that a user means: ours, or an exception that says what else it is."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("the default process group is not initialised; call init_process_group first")
    ours = group_of(found)
    if ours is None:
        raise TypeError(f"expected a group of the mpiplus backend, not {type(found).__name__}")
    return ours


def get_comm(group: dist.ProcessGroup | None = None) -> Any:
    """An ``mpi4py`` communicator with the group's ranks in torch's order, for your own messages.

    The first call for a group is collective over it: MPI makes a duplicate, so that your messages and ours
    can never meet. Later calls return the same communicator. Do not free it; it is freed with the group.

    Args:
        group: a group of the mpiplus backend; the world if None.

    Returns:
        ``mpi4py.MPI.Intracomm``.

    Raises:
        TypeError: a group of another backend.
        DistBackendError: not all ranks of the group made the call within its timeout.
    """
    ours = resolve(group)
    runtime.refuse_without_mpi("get_comm")
    if ours.user_communicator is None:
        ours.checkin.gather("get_comm", "", ours.timeout, f"torchmpi_plugin.get_comm of {ours.label}")
        with runtime.exclusive():
            ours.user_communicator = ours.communicator.of_its_own()
            ours.user_communicator.Set_errhandler(runtime.mpi().ERRORS_RETURN)
    return ours.user_communicator


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that did not come; torch's own is for gloo only.

    It goes over torch's store, not over MPI: slower than ``barrier()``, but it works when MPI does not.

    Args:
        group: a group of the mpiplus backend; the world if None.
        timeout: how long to wait; the group's timeout if None.
        wait_all_ranks: accepted for compatibility: all missing ranks are always named.

    Raises:
        DistBackendError: some ranks did not come in time; every rank that came gets this error.
    """
    resolve(group).monitored_barrier(timeout, wait_all_ranks)


def scan(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Reduce the tensors of ranks 0 to this one elementwise, in place: MPI's inclusive prefix reduction.

    Args:
        tensor: of the same dtype and number of elements on every rank, of any shape and layout.
        op: as for ``all_reduce``; not AVG, which divides by the number of all ranks.
        group: a group of the mpiplus backend; the world if None.
        async_op: return a Work at once, as ``all_reduce`` does.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        TypeError: a group of another backend, no ``ReduceOp``, or a dtype that cannot be reduced.
        ValueError: an operation that makes no sense for the dtype, or AVG.
    """
    return _prefix("scan", tensor, op, group, async_op)


def exscan(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Reduce the tensors of the ranks before this one, in place: MPI's exclusive prefix reduction.

    Rank 0 has none before it: its tensor stays as it is, as in MPI. All else is as for :func:`scan`.
    """
    return _prefix("exscan", tensor, op, group, async_op)


def _prefix(
    name: str, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None, async_op: bool
) -> dist.Work | None:
    ours, opts = resolve(group), dist.AllreduceOptions()
    if not isinstance(op, dist.ReduceOp):
        raise ArgumentTypeError(f"{name}: op must be one of torch.distributed.ReduceOp, such as SUM, not {op!r}")
    if kind_of(op) == AVG:
        raise ArgumentError(f"{name}: AVG makes no sense for a prefix; take SUM, and divide by the number of its ranks")
    opts.reduceOp, opts.asyncOp = op, async_op
    work = OWN[name](ours, [tensor], opts)
    if async_op:
        return work
    work.wait()
    return None


def statistics(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return what this rank's operations on a group have taken since it was made.

    Args:
        group: a group of the mpiplus backend; the world if None.

    Returns:
        ``rank`` and ``size`` of the group; ``operations``: by the name of the call its number of ``calls``, their
        ``bytes``, and ``hand_overs``: how often this rank gave its core away while it waited for them, asleep or to who
        else wants it; ``seconds_in_calls`` in which operations were under way, from the call until they were complete;
        ``seconds_waiting``: those of them from this rank's call to the last rank's; ``seconds_waited_for``: by rank of
        the world those from this rank's call to that one's. It does not matter how a program waits, and what several
        operations wait for at a time counts once.

    Raises:
        TypeError: a group of another backend.
        ValueError: no group is given, and there is no world.
    """
    return counted.of(resolve(group))


def prometheus(group: dist.ProcessGroup | None = None) -> str:
    """:func:`statistics` in Prometheus' text format, for an exporter or node_exporter's textfile collector.

    Args:
        group: a group of the mpiplus backend; the world if None.

    Returns:
        Counters ``mpiplus_calls_total``, ``mpiplus_bytes_total``, ``mpiplus_hand_overs_total``,
        ``mpiplus_seconds_in_calls_total``, ``mpiplus_seconds_waiting_total`` and ``mpiplus_seconds_waited_for_total``.

    Raises:
        TypeError: a group of another backend.
        ValueError: no group is given, and there is no world.
    """
    ours = resolve(group)
    return counted.as_text(ours.group_name, counted.of(ours))


# ---- going on without the ranks that died, where MPI can (ULFM: User Level Failure Mitigation) ----


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
    runtime.refuse_without_mpi("shrink")
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
