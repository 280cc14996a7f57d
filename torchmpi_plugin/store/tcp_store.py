"""The store of ``mpi://``: a TCPStore on rank 0's node, whose address travels over MPI."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store, TCPStore

from .. import protocol
from ..errors import DistBackendError
from ..launchers import variables as launchers
from ..mpi import nonblocking, runtime
from ..names import describe_ranks
from ..node import lookups, node, processes

_CONNECT_SECONDS = 3.0
_REBIND_SECONDS = 3.0
#: What rank 0 has to connect to its own store, a quarter of the time within these: torch takes up to twice that, and
#: the others must be told in their time.
_OWN_SHORTEST, _OWN_LONGEST = timedelta(seconds=2), timedelta(seconds=30)
#: For the others that give up to say so.
_LATE_SECONDS = 1.0
#: Of each rank: torch's, one of its own to answer on, and one to see whether the address can be reached.
_CONNECTIONS = 3
#: So many processes are named where ranks were given twice.
_ENOUGH = 8


class _Process(NamedTuple):
    """The ranks that take part."""

    hostname: str
    rank: int
    node: str
    pid: int


_OWN_RANKS = "Give each process its own, in the variable RANK or as rank=; or neither, to take MPI's ranks"

#: The newest world's server, kept until the next one: ranks that destroyed the world earlier may be asked about.
kept: Store | None = None
_servers: weakref.WeakSet[TCPStore] = weakref.WeakSet()
# In a forked child they stay: at its end one would wait for its thread, which only the parent has.
os.register_at_fork(after_in_child=lambda: [ctypes.pythonapi.Py_IncRef(ctypes.py_object(it)) for it in _servers])


def make_store(base: Any, rank: int, address: str, port: int, timeout: timedelta) -> Store:
    """Every rank of ``base`` calls this; an address of ``""`` and a port of 0 leave it open where the store is.

    Raises:
        DistBackendError: ranks that do not come, were given twice, or cannot reach rank 0.
    """
    global kept  # noqa: PLW0603
    size, members = base.Get_size(), Members(base, timeout)
    everybody = members.introduce(rank)
    ranks = [process.rank for process in everybody]
    root = ranks.index(0)
    server, offer = None, None
    if rank == 0:
        server, offer = _serve(address, port, size, timeout, len({process.node for process in everybody}) == 1)
    offer = members.all_gather(offer)[root]
    if isinstance(offer, str):
        raise DistBackendError(f"init_process_group: rank 0 could not open the store: {offer}")
    addresses, port = offer
    reachable = [True] * len(addresses) if rank == 0 else [_can_connect(a, port) for a in addresses]
    votes = members.all_gather(reachable)
    good = [a for i, a in enumerate(addresses) if all(vote[i] for vote in votes)]
    if not good:
        deaf = [ranks[i] for i, vote in enumerate(votes) if not any(vote)]
        raise DistBackendError(
            f"init_process_group: {describe_ranks(deaf or list(range(1, size)))} cannot connect to rank 0's store at "
            f"{', '.join(addresses)} port {port}; check the network or set MASTER_ADDR to an address all nodes reach"
        )
    store = server
    if store is None:
        with lookups.lookups_are_short(good[0]):
            store = TCPStore(good[0], port, size, False, timeout, wait_for_workers=False)
    # Whatever fails next on rank 0 may take the server away: only once everybody is connected.
    members.part()
    kept = server
    return store


class Members:
    """The ranks of a communicator before they have a store, with one deadline for all that they do.

    They talk on a duplicate of it: of COMM_WORLD always the same, of the user's each time another.
    """

    _of_world: Any = None

    def __init__(self, base: Any, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._until = time.monotonic() + self._seconds
        self._is_world = base == runtime.mpi().COMM_WORLD
        self._comm = (Members._of_world if self._is_world else None) or self._duplicate(base)
        if self._is_world:
            Members._of_world = self._comm

    def _duplicate(self, base: Any) -> Any:
        comm, request = base.Idup()

        def check() -> None:
            if time.monotonic() > self._until:
                runtime.doubt = "init_process_group gave up here"
                raise DistBackendError(
                    f"init_process_group: after {self._seconds:g} s not all of MPI's {base.Get_size()} ranks have "
                    f"called it (this is MPI rank {base.Get_rank()})"
                )

        nonblocking.wait(request, (comm,), check)
        return comm

    def introduce(self, rank: int) -> list[_Process]:
        """Return who they are, this one as ``rank``; a DistBackendError: some do not come, or were given twice."""
        hostname = socket.gethostname()
        words = self.all_gather([*protocol.this(hostname), rank, node.identity(), os.getpid()])
        if different := protocol.disagreement([protocol.Build(*of_rank[:3]) for of_rank in words]):
            raise DistBackendError(f"init_process_group: {different}")
        everybody = [_Process(*of_rank[2:]) for of_rank in words]
        _check_ranks(everybody)
        return everybody

    def all_gather(self, mine: Any) -> list[Any]:
        """Return what each rank brings, as JSON has it: ranks of another build of mpiplus must be able to read it."""
        return [json.loads(text) for text in nonblocking.all_gather(self._comm, json.dumps(mine).encode(), self._check)]

    def part(self) -> None:
        """Until all have come here."""
        nonblocking.barrier(self._comm, self._check)
        self.close()

    def close(self) -> None:
        """After the last word."""
        if not self._is_world:
            with runtime.exclusive():
                self._comm.Free()

    def _check(self) -> None:
        if time.monotonic() < self._until:
            return
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        silent = nonblocking.silent_ranks(self._comm, _LATE_SECONDS)
        if self._is_world:
            Members._of_world = None  # what was begun on it goes on
        runtime.doubt = "init_process_group gave up here"
        who = f"MPI {describe_ranks(silent)}" if silent else "some ranks"
        raise DistBackendError(
            f"init_process_group: MPI rank {rank} of {size} gave up after {self._seconds:g} s: {who} began "
            f"this too, and stopped half-way. Either the process was stopped or has failed there, or its node cannot "
            f"be reached."
        )


def _check_ranks(everybody: list[_Process]) -> None:
    """Each rank once; ``everybody`` is in the order of MPI's ranks."""
    ranks = [process.rank for process in everybody]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if not twice:
        return
    who = [
        f"rank {process.rank} to MPI rank {number} (process {process.pid} on {process.hostname})"
        for number, process in enumerate(everybody)
        if process.rank in twice
    ]
    more = [f"and {len(who) - _ENOUGH} more"] if len(who) > _ENOUGH else []
    raise DistBackendError(
        f"init_process_group: {describe_ranks(twice)} given to several processes: {', '.join(who[:_ENOUGH] + more)}. "
        + (launchers.slurms_word(twice[0]) or _OWN_RANKS)
    )


def _serve(wanted: str, port: int, size: int, timeout: timedelta, one_node: bool) -> tuple[Store | None, Any]:
    """The store's server and where to find it, or the reason there is none."""
    addresses = [wanted] if wanted else node.addresses(one_node)
    processes.allow_connections(_CONNECTIONS * size)
    if few := processes.scarcity_of_files():
        return None, few  # torch's server would refuse the others in silence, who would try again until their deadline
    try:
        server = listen(addresses[0], port, size, timeout, is_ours=not wanted)
    except (RuntimeError, ValueError, OSError) as error:
        return None, port_in_use(port) if _is_busy(error) else str(error).splitlines()[0]
    return server, (addresses, server.port)


def listen(
    address: str, wanted: int, size: int, timeout: timedelta, is_ours: bool = True, multi_tenant: bool = False
) -> TCPStore:
    """The server of a store. A port that the user chose may be busy for a moment yet with the world before.

    Where it is ``multi_tenant`` torch's own rendezvous in this process shares it.
    """
    until = time.monotonic() + _REBIND_SECONDS
    while True:
        try:
            port = wanted
            how: dict[str, Any] = {"multi_tenant": multi_tenant}
            if address == node.LOOPBACK and is_ours:
                # torch's own listens to every network, and looks up the names of those who connect under an address
                # (::ffff:127.0.0.1) that no list of hosts has.
                listener = socket.create_server((node.LOOPBACK, port))
                port, how["master_listen_fd"] = listener.getsockname()[1], listener.detach()
            with lookups.lookups_are_short(address):
                own = min(max(timeout / 4, _OWN_SHORTEST), _OWN_LONGEST)
                server = TCPStore(address, port, size, True, own, wait_for_workers=False, **how)
            server.set_timeout(timeout)
            _servers.add(server)
            return server
        except (RuntimeError, OSError) as error:
            if wanted == 0 or not _is_busy(error) or time.monotonic() > until:
                raise
        time.sleep(0.1)


def _is_busy(error: Exception) -> bool:
    return "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE


def port_in_use(port: int | None) -> str:
    """Return an advice where somebody else listens on the port of the job's store."""
    return (
        f"port {port} on {socket.gethostname()} (MASTER_PORT, or init_method's) is in use: by another job, or by a "
        f"process of this one that has rank 0 as well. Give each job a port of its own, or none (mpirun and mpiplus "
        f"run need none), and each process its own RANK. This is process {os.getpid()}"
    )


def _can_connect(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_SECONDS):
        return True
    return False
