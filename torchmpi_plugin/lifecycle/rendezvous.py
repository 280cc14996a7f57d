"""The rendezvous of ranks: ``mpi://``, and ``env://`` where mpirun has set none of torch's variables."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.constants import default_pg_timeout

from .. import settings, torch_internals
from ..communicator.steps import Steps
from ..diagnosis import flight_recorder
from ..errors import DistBackendError
from ..launchers import variables as launchers
from ..mpi import runtime
from ..names import BACKEND, counted
from ..node import lookups, node
from ..options import among
from ..store import tcp_store
from ..tensors.arguments import check_timeout
from . import shutdown

#: What comes after the deadline of init_process_group: who has not come is asked for, and rank 0's addresses are tried.
_STUCK_SECONDS = 20.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Rendezvous = Iterator[tuple[Store, int, int]]


def refuse_shared(backends: Mapping[str, str]) -> None:
    """Refuse a group of several backends where torch would drop some.

    Before torch 2.15 ``_new_process_group_helper`` knows no backend in Python: it takes a Python process group for the
    whole, and drops the rest. Refused before ranks meet: another backend is made first, and would wait for a rank that
    has ended.
    """
    if len(set(backends.values())) > 1 and not torch_internals.has_python_backends():
        names = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise RuntimeError(
            f"torch {torch.__version__} cannot combine mpiplus with other backends in one group ({names}): that takes "
            f"torch 2.15. mpiplus takes CPU and CUDA tensors; or make one group for each backend: "
            f"init_process_group('mpiplus') and new_group(backend=...)"
        )


def _request() -> tuple[str, Any]:
    """Look up backend and options in the caller's frame: torch does not tell a rendezvous handler who asks.

    The backend matters because other backends must keep torch's own errors, the options because the world
    may run on a communicator of the user's.
    """
    found = torch_internals.calling_frame("backend", "init_process_group")
    if found is None:
        return "", None
    backend = str(found["backend"] or "undefined")
    if backend == "undefined":  # torch takes that of the machine's accelerator or, without one, of its CPU
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        backend = dist.Backend.default_device_backend_map.get(kind, "")
    if BACKEND in backend.lower() and "," in backend:
        refuse_shared(dict(dist.distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()))
    return backend, found.get("pg_options") if "," not in backend else among(found.get("pg_options"), True)


class Given(NamedTuple):
    """The user's words, in arguments of ``init_process_group`` or else in variables; None where there are none."""

    rank: int | None
    size: int | None
    address: str | None
    port: int | None


def _given(url: str, environment: Mapping[str, str], ranks: bool = True) -> Given:
    arguments = dict(parse_qsl(urlparse(url).query))

    def number(name: str, lowest: int, highest: float = math.inf) -> int | None:
        argument = arguments.get(name.lower())
        what, text = (name.lower(), argument) if argument else (f"the variable {name}", environment.get(name))
        if not text:
            return None
        with contextlib.suppress(ValueError):
            if lowest <= int(text) <= highest:
                return int(text)
        allowed = f"{lowest} or more" if highest == math.inf else f"from {lowest} to {highest}"
        raise ValueError(f"init_process_group: {what} must be an integer, {allowed}, not {text!r}")

    if not ranks:
        environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    given = Given(
        number("RANK", 0),
        number("WORLD_SIZE", 1),
        environment.get("MASTER_ADDR") or None,
        number("MASTER_PORT", 0, 65535),
    )
    if given.address and (why := lookups.why_unknown(given.address)):
        raise ValueError(
            f"init_process_group: the variable MASTER_ADDR is {given.address!r}, a name that is not known here: {why}. "
            f"Set it to an address of rank 0's node, or leave it out: then MPI carries the address"
        )
    return given


def check_arguments(doing: str, timeout: timedelta) -> None:
    """Raise what is wrong on this rank here, before anybody waits for it.

    Raises:
        ValueError: a variable of ours or of the flight recorder, or a timeout that cannot be.
        RuntimeError: torchcomms makes the groups.
    """
    shutdown.watch_for_uncaught_exceptions()
    settings.check()
    if torch_internals.uses_torchcomms():
        raise RuntimeError(
            "init_process_group: torchcomms is to make the groups, and has no backend 'mpiplus'. Switch it off: "
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS=0, or torch.distributed.config.use_torchcomms = False"
        )
    flight_recorder.entries_wanted()
    check_timeout(doing, timeout)


def torchs_rendezvous(torch_handler: Callable[..., Rendezvous], url: str, **arguments: Any) -> Rendezvous:
    """torch's ``env://`` and ``tcp://``; for mpiplus, MPI supplies what the environment does not, in our words."""
    backend, options = _request()
    where = urlparse(url)
    if BACKEND not in backend.lower():
        handler = torch_handler(url, **arguments)
        return _others(handler) if where.scheme == "env" else handler
    timeout = arguments.get("timeout", default_pg_timeout)
    check_arguments("init_process_group", timeout)
    if where.scheme == "tcp":
        given = _given(url, {})._replace(address=where.hostname, port=where.port)
        return _torchs(torch_handler(url, **arguments), given, options, timeout)
    if _exported_by_us():
        return mpi_rendezvous(url, **arguments)
    given = _given(url, os.environ)
    if None in given:
        return mpi_rendezvous(url, use_environment=True, **arguments)
    if given.size != 1 and given.port == 0:
        raise ValueError("init_process_group: the variable MASTER_PORT must be a port that rank 0 can listen on, not 0")
    return _torchs(torch_handler(url, **arguments), given, options, timeout)


def _others(handler: Rendezvous) -> Rendezvous:
    """Another backend's. Its server on rank 0 may be ours: after our world it is its own, and ends with its group."""
    global _open_store  # noqa: PLW0603
    first = next(handler)
    if not dist.is_initialized():
        _open_store = None
    yield first
    yield from handler


def _check_ranks(given: Given, options: Any, timeout: timedelta) -> None:
    """Refuse what torch would wait for in vain: all that it needs is there, but it cannot be."""
    rank, size = given.rank, given.size
    if rank is None or size is None:
        return
    if rank >= size:
        raise ValueError(f"init_process_group: rank {rank} is out of range for world size {size}")
    launch = launchers.detect()
    if launchers.started_by_mpi(size=size) and launch is not None and launch.size <= size:
        # By MPI, as with its store: where ranks were given twice, others than torch's rank 0 would wait for each other,
        # and some launchers end no job before MPI runs.
        base = start_mpi(options, timeout)
        check_world_size(size, base.Get_size())
        members = tcp_store.Members(base, timeout)
        members.introduce(rank)
        members.close()


def _torchs(handler: Rendezvous, given: Given, options: Any, timeout: timedelta) -> Rendezvous:
    """torch's own rendezvous, with a better word on its commonest mistakes."""
    _check_ranks(given, options, timeout)
    try:
        with lookups.lookups_are_short(given.address or ""):
            first = next(handler)
    except RuntimeError as error:
        if given.rank != 0 or "EADDRINUSE" not in str(error):
            raise
        words = filter(None, (tcp_store.port_in_use(given.port), launchers.slurms_word(0)))
        raise DistBackendError(f"init_process_group: {'. '.join(words)}") from None
    yield first
    yield from handler


def mpi_rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, use_environment: bool = False, **_: Any
) -> Rendezvous:
    """Rank and size from MPI, and a TCPStore on rank 0's node whose address travels over MPI.

    Args:
        url: ``mpi://``; torch appends rank and world_size where the user gave them.
        use_environment: RANK and WORLD_SIZE, where set, have a say.

    Raises:
        ValueError: a size that is not MPI's, a rank out of range, or a variable with an impossible value.
        DistBackendError: ranks that do not come, give the same rank twice, or cannot be reached.
    """
    check_arguments("init_process_group", timeout)
    given = _given(url, {} if _exported_by_us() else os.environ, use_environment)
    base = start_mpi(_request()[1], timeout)
    size = base.Get_size()
    if given.size is not None:
        check_world_size(given.size, size)
    rank = base.Get_rank() if given.rank is None else given.rank
    if rank >= size:
        raise ValueError(f"init_process_group: rank {rank} is out of range for world size {size}")
    with runtime.ending("init_process_group", timeout.total_seconds() + _STUCK_SECONDS):
        store = tcp_store.make_store(base, rank, given.address or "", given.port or 0, timeout)
    yield store, rank, size
    raise RuntimeError("mpi:// cannot rendezvous again: MPI's ranks are fixed at launch")


def start_mpi(options: Any, timeout: timedelta) -> Any:
    """The communicator the world's ranks come from; from now on a rank that fails ends the job."""
    runtime.start_within(timeout.total_seconds())
    ours = among(options, shared=False)
    shutdown.abort_on_exception = ours is None or ours.abort_on_exception
    shutdown.install()
    return runtime.mpi().COMM_WORLD if ours is None or ours.comm is None else ours.comm


def check_world_size(asked: int, size: int) -> None:
    """torch's size and MPI's must agree; else a ValueError says what usually causes it."""
    if asked == size:
        return
    library = runtime.library_name(runtime.mpi())
    launch = launchers.detect()
    if size > 1 and asked == 1:
        cause = (
            " Does the script read RANK and WORLD_SIZE, which mpirun does not set? mpiplus run does: "
            f"mpiplus run -n {size} SCRIPT."
        )
    elif size > 1:
        cause = ""
    elif launch is not None and launchers.started_by_mpi() and launch.size == 1:
        cause = (
            f" {launch.launcher} has started one process ({launch.variable}=1): start {asked} with it, as in "
            f"mpirun -n {asked}."
        )
    else:
        cause = (
            f" MPI sees one rank: most likely the job was not started by the mpirun/mpiexec of this MPI ({library})."
        )
    raise ValueError(
        f"world_size is {asked}, but MPI started {counted(size, 'rank')}.{cause} Leave rank and "
        f"world_size out, and the variables RANK and WORLD_SIZE, to take MPI's; to run on some of the ranks pass "
        f"pg_options=torchmpi_plugin.Options(comm=...)"
    )


# ---- the environment after init ----

#: Rank 0's server at the address that we export.
_open_store: dist.TCPStore | None = None
# Those that `mpiplus run` has set are MPI's word, as ours are.
_exported: dict[str, str] = {
    name: os.environ[name] for name in os.environ.get(settings.RUN, "").split(",") if name in os.environ
}


def _exported_by_us() -> bool:
    """Return whether torch's variables are what an earlier init of ours left there."""
    return bool(_exported) and all(os.environ.get(name) == _exported.get(name) for name in _VARIABLES)


def _users(name: str) -> str:
    """The value of a variable that is not ours; empty: it has none."""
    value = os.environ.get(name, "")
    return "" if value == _exported.get(name) else value


def export_environment(communicator: Any, steps: Steps) -> None:
    """Set torchrun's variables where they are missing. Every rank of the new world calls this.

    MASTER_PORT is not that of our own store, whose keys another world's would meet. Who reads it finds a store there:
    clients (torch's checkpoint process), and who means to listen (a second init with another backend, RPC).
    """
    comm, place = communicator.comm, communicator.place
    rank = comm.Get_rank()

    def open_store() -> tuple[str, int]:
        global _open_store  # noqa: PLW0603
        here = node.addresses(communicator.node_count == 1)[0]
        if port := _users("MASTER_PORT"):
            return here, int(port)
        address = _users("MASTER_ADDR") or here
        _open_store = tcp_store.listen(address, 0, comm.Get_size(), default_pg_timeout, multi_tenant=True)
        return here, _open_store.port

    address, port = steps.take(lambda: open_store() if rank == 0 else ("", 0))[0]
    values = {
        "RANK": rank,
        "WORLD_SIZE": comm.Get_size(),
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "NODE_RANK": place.node_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        if not _users(name):
            os.environ[name] = _exported[name] = str(value)
