"""From torch's request for a group to a group."""

from __future__ import annotations

import functools
from typing import Any

from .. import settings, torch_internals
from ..api import backend, dispatcher
from ..communicator import choice, cuda_path, membership
from ..communicator.communicator import Communicator
from ..communicator.steps import Steps
from ..diagnosis import comparison, flight_recorder
from ..group import statistics, world
from ..group.process_group import ProcessGroupMPI
from ..mpi import runtime
from ..names import log
from ..options import Options
from ..options import among as options_among
from ..status import answering
from ..timeline import recording
from . import bootstrap, rendezvous, shutdown


def _base_of_subgroup(options: Options | None, size: int) -> Any:
    """The communicator that its ranks come from: the world's, unless the user gave one of just these ranks."""
    if options is None or options.comm is None:
        return world.base()
    if options.comm.Get_size() != size:
        raise ValueError(
            f"new_group: the group has size {size}, Options(comm=...) has {options.comm.Get_size()}; it must have the "
            f"same. Leave it out to take the ranks from the world"
        )
    return options.comm


def create_process_group(opts: Any, options: Any = None) -> Any:
    """Called by torch on every member of a new group, with its DistributedBackendOptions and the user's ``pg_options``.

    Returns:
        The group itself; or, where it has other backends too or the user asked for it, a backend for torch's own.

    Raises:
        TypeError: ``pg_options`` that are not ours.
        ValueError: a size that is not MPI's, a timeout or a variable that cannot be.
        DistBackendError: members that do not come in time.
    """
    if getattr(opts, "enable_reconfigure", False):
        raise NotImplementedError(
            "init_process_group(enable_reconfigure=True): no process can join a job of MPI's later. Leave it out; "
            "torchmpi_plugin.shrink makes a group of those that are left"
        )
    backends = torch_internals.device_backends()
    rendezvous.refuse_shared(backends)
    shared = len(set(backends.values())) > 1
    options = options_among(options, shared)
    doing = "new_group" if opts.global_ranks_in_group else "init_process_group"
    ranks = list(opts.global_ranks_in_group)
    is_world = not ranks
    torch_internals.leave_out_of_compilation()
    torch_internals.answer_timeouts()
    rendezvous.check_arguments(doing, opts.timeout)
    chosen = options or Options()
    asked_for = choice.group_config(chosen.collectives, chosen.reproducible, chosen.wire_dtype)
    if is_world:
        ranks = list(range(opts.group_size))
        if bootstrap.needed(opts.group_size):
            bootstrap.make_world(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        base = rendezvous.start_mpi(options, opts.timeout)
        rendezvous.check_world_size(opts.group_size, base.Get_size())
    else:
        runtime.refuse_without_mpi(doing)
        base = _base_of_subgroup(options, opts.group_size)
    gone, compares = None if is_world else functools.partial(world.gone, ranks), comparison.wanted()
    comm, checkin = membership.create(
        base, opts.store, opts.group_id, opts.group_rank, ranks, opts.timeout, compares, asked_for, gone
    )
    if is_world:
        _agree(comm, Steps(checkin, opts.timeout, "init_process_group", comm.comm), chosen.cuda)
    shutdown.install()
    group = ProcessGroupMPI(comm, checkin, opts.store, opts.group_id, ranks, opts.timeout)
    world.remember(group, "default_pg" if is_world else opts.group_id)
    log.info("mpiplus: %s: %s: %s", group.label, comm.describe(), comm.footprint)
    if is_world:
        _begin(group)
    return _in_api_mode(group, shared, options)


def _begin(group: ProcessGroupMPI) -> None:
    """``group`` becomes the world, or ends."""
    comm = group.communicator
    try:
        flight_recorder.start(group.rank())
        statistics.begin()
        answering.start(group.rank(), group.size(), comm.place.node_rank, comm.secret)
        shutdown.read_settings()
        world.adopt(group)
        recording.begin(group)
        if group.rank() == 0:
            settings.warn_of_names()
    except BaseException:
        comm.may_be_sent_to = True
        group.shutdown()
        raise


def _agree(comm: Communicator, steps: Steps, cuda: str | None) -> None:
    """Agree with all ranks of a world, once, on what is the same for them."""
    try:
        cuda_path.choose(steps, cuda, comm.place.local_rank)
        rendezvous.export_environment(comm, steps)
    except BaseException:
        comm.may_be_sent_to = True
        comm.free()
        raise


def _in_api_mode(group: ProcessGroupMPI, shared: bool, options: Options | None) -> Any:
    """Return what torch gets: see docs/api-modes.md."""
    if not torch_internals.has_python_backends():
        dispatcher.attach(group)
        return group
    if shared or (options is not None and options.api_mode == "dispatcher"):
        return backend.as_backend(group)
    backend.attach(group)
    return group
