"""How ranks find each other: ``mpi://``, and ``env://`` where mpirun has set none of torch's variables."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlparse

from torch.distributed import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from . import mpi_runtime, node, shutdown, torch_internals
from ._autoload import BACKEND
from .errors import DistBackendError, describe_ranks
from .options import among

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_SECONDS = 3.0
_REBIND_SECONDS = 3.0

Rendezvous = Iterator[tuple[Store, int, int]]


class Request(NamedTuple):
    """What the running ``init_process_group`` was asked for."""

    backend: str
    options: Any


def _request() -> Request:
    """Look it up in the caller's frame: torch does not tell a rendezvous handler who asks.

    The backend matters because other backends must keep torch's own errors, the options because the world
    may run on a communicator of the user's.
    """
    found = torch_internals.calling_frame("backend", "init_process_group")
    if found is None:
        return Request("", None)
    backend = str(found["backend"] or "")
    return Request(backend, found.get("pg_options") if "," not in backend else among(found.get("pg_options"), True))


def env_rendezvous(torch_handler: Callable[..., Rendezvous], url: str, **arguments: Any) -> Rendezvous:
    """torch's ``env://``; for mpiplus, MPI supplies what the environment does not."""
    if BACKEND not in _request().backend.lower():
        return torch_handler(url, **arguments)
    given = dict(parse_qsl(urlparse(url).query))
    present = {name for name in _VARIABLES if os.environ.get(name)}
    present |= {name for name, key in (("RANK", "rank"), ("WORLD_SIZE", "world_size")) if key in given}
    if present.issuperset(_VARIABLES) and not _exported_by_us():
        return torch_handler(url, **arguments)
    return mpi_rendezvous(url, use_environment=not _exported_by_us(), **arguments)


def _number(text: str | None, what: str) -> int | None:
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"mpi:// rendezvous: {what} must be an integer, not {text!r}") from None


def mpi_rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, use_environment: bool = False, **_: Any
) -> Rendezvous:
    """Rank and size from MPI, and a TCPStore on rank 0's host whose address travels over MPI.

    Args:
        url: ``mpi://``; torch appends rank and world_size where the user gave them.
        timeout: how long to wait for the other ranks.
        use_environment: RANK and WORLD_SIZE, where set, have a say.

    Raises:
        ValueError: a size that is not MPI's, or a rank out of range.
        DistBackendError: ranks that do not come, give the same rank twice, or cannot be reached.
    """
    given = dict(parse_qsl(urlparse(url).query))
    environment = os.environ if use_environment else {}
    base = base_communicator(_request().options)
    size = base.Get_size()
    asked = _number(given.get("world_size", environment.get("WORLD_SIZE")), "world_size")
    if asked is not None:
        check_world_size(asked, size)
    rank = _number(given.get("rank", environment.get("RANK")), "rank")
    rank = base.Get_rank() if rank is None else rank
    if not 0 <= rank < size:
        raise ValueError(f"mpi:// rendezvous: rank {rank} is out of range for {size} ranks")
    yield _make_store(base, rank, size, timeout), rank, size
    raise RuntimeError("mpi:// cannot rendezvous again: MPI's ranks are fixed at launch")


def base_communicator(options: Any) -> Any:
    """The communicator the world's ranks come from."""
    ours = among(options, shared=False)
    comm = ours.comm if ours is not None else None
    return mpi_runtime.mpi().COMM_WORLD if comm is None else comm


def check_world_size(asked: int, size: int) -> None:
    """torch's size and MPI's must agree.

    Raises:
        ValueError: they do not; the message says what usually causes it.
    """
    if asked == size:
        return
    library = mpi_runtime.library_name(mpi_runtime.mpi())
    cause = (
        f" MPI sees one rank: most likely the job was not started by the mpirun/mpiexec of this MPI ({library})."
        if size == 1
        else ""
    )
    raise ValueError(
        f"world_size is {asked}, but MPI started {size} rank{'s' if size > 1 else ''}.{cause} Leave rank and "
        f"world_size out to take MPI's; to run on some of the ranks pass "
        f"pg_options=torchmpi_plugin.Options(comm=...)"
    )


_service_communicators: dict[int, Any] = {}


def _service(base: Any, timeout: timedelta) -> Any:
    """A duplicate of ``base`` for start-up messages; made once. Waits with a deadline for all ranks."""
    handle = mpi_runtime.handle_of(base)
    if handle not in _service_communicators:
        comm, request = base.Idup()
        deadline = time.monotonic() + timeout.total_seconds()
        while not request.Test():
            if time.monotonic() > deadline:
                raise DistBackendError(
                    f"init_process_group: after {timeout.total_seconds():g} s not all of MPI's {base.Get_size()} "
                    f"ranks have called it (this is MPI rank {base.Get_rank()})"
                )
            time.sleep(0.0002)
        _service_communicators[handle] = comm
    return _service_communicators[handle]


def _make_store(base: Any, rank: int, size: int, timeout: timedelta) -> Store:
    comm = _service(base, timeout)
    ranks = comm.allgather(rank)
    if sorted(ranks) != list(range(size)):
        twice = sorted({r for r in ranks if ranks.count(r) > 1})
        raise DistBackendError(f"init_process_group: {describe_ranks(twice)} given to several processes")
    root = ranks.index(0)
    nodes = comm.allgather(node.identity())
    server, offer = None, None
    if rank == 0:
        server, offer = _serve(size, timeout, len(set(nodes)) == 1)
    offer = comm.bcast(offer, root=root)
    if isinstance(offer, str):
        raise DistBackendError(f"init_process_group: rank 0 could not open the store: {offer}")
    addresses, port = offer
    reachable = [True] * len(addresses) if rank == 0 else [_can_connect(a, port) for a in addresses]
    votes = comm.allgather(reachable)
    good = [a for i, a in enumerate(addresses) if all(vote[i] for vote in votes)]
    if not good:
        deaf = [ranks[i] for i, vote in enumerate(votes) if not any(vote)]
        raise DistBackendError(
            f"init_process_group: {describe_ranks(deaf or list(range(1, size)))} cannot connect to rank 0's store at "
            f"{', '.join(addresses)} port {port}; check the network or set MASTER_ADDR to an address all nodes reach"
        )
    store = server if server is not None else TCPStore(good[0], port, size, False, timeout, wait_for_workers=False)
    # Whatever fails next on rank 0 may take the server away: only once everybody is connected.
    comm.Barrier()
    shutdown.keep_store(server)
    return store


def _serve(size: int, timeout: timedelta, one_node: bool) -> tuple[Store | None, Any]:
    """The store's server and where to find it, or the reason there is none."""
    own = not _exported_by_us()
    wanted = os.environ.get("MASTER_ADDR", "") if own else ""
    addresses = [wanted] if wanted else own_addresses(one_node)
    try:
        port = int(os.environ.get("MASTER_PORT", "0")) if own else 0
        server = _listen(addresses[0], port, size, timeout)
    except (RuntimeError, ValueError) as error:
        return None, str(error).splitlines()[0]
    return server, (addresses, server.port)


def _listen(address: str, port: int, size: int, timeout: timedelta) -> TCPStore:
    """The server of a store. A port that the user chose may be busy for a moment yet with the world before."""
    until = time.monotonic() + _REBIND_SECONDS
    while True:
        try:
            return TCPStore(address, port, size, True, timeout, wait_for_workers=False)
        except RuntimeError as error:
            if port == 0 or "EADDRINUSE" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.1)


def own_addresses(one_node: bool) -> list[str]:
    """Where other ranks may find this host, the likeliest first."""
    return ["127.0.0.1"] if one_node else node.addresses()


def _can_connect(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_SECONDS):
        return True
    return False


# ---- the environment after init ----

# Those that `mpiplus run` has set are MPI's word, as ours are.
_exported: dict[str, str] = (
    {name: os.environ[name] for name in _RANK_VARIABLES if name in os.environ} if "MPIPLUS_RUN" in os.environ else {}
)


def _exported_by_us() -> bool:
    """Whether torch's variables are what an earlier init of ours left there."""
    return bool(_exported) and all(os.environ.get(name) == _exported.get(name) for name in _VARIABLES)


def export_environment(communicator: Any) -> None:
    """Set torchrun's variables where they are missing.

    MASTER_PORT is a free port on rank 0's host, not that of our own store: whoever reads it (a second init
    with another backend, RPC) wants to listen there.
    """
    comm, place = communicator.comm, communicator.place
    rank = comm.Get_rank()
    master = (own_addresses(place.node_count == 1)[0], _free_port()) if rank == 0 else None
    address, port = comm.bcast(master)
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
        if not os.environ.get(name) or os.environ[name] == _exported.get(name):
            os.environ[name] = _exported[name] = str(value)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
