"""An MPI world of processes that MPI's launcher did not start: torchrun's, or a test's spawned ones.

The MPICH family finds its peers over a small wire protocol, whose server (``pmi_server.py``) rank 0 starts;
torch's store carries the server's address. Open MPI finds them through PMIx, for which there is no such
short cut: there the user is told how to start the job instead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import secrets
import shlex
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store

from ..errors import DistBackendError
from ..launchers import variables as launchers
from ..mpi import library as mpi_library
from ..mpi import pmi, runtime
from ..node import node, processes
from ..node.calling import call
from ..node.processes import python_command
from ..store.checkin import CheckIn

_MPI_VARIABLES = ("PMI_", "PMIX_", "SLURM_", "HYDRA_", "MPI_LOCAL")
_DOING = "init_process_group: making an MPI world of processes that MPI did not start"


def needed(size: int) -> bool:
    """Return whether these processes are several, and no launcher has told MPI so."""
    return size > 1 and not (launchers.started_by_mpi(size=size) or mpi_library.load().Is_initialized())


def make_world(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Initialise MPI with ``COMM_WORLD`` made of all ranks of ``store``, in torch's order.

    Raises:
        RuntimeError: an MPI that cannot be joined from outside; the message has the command to use instead.
        DistBackendError: ranks that do not come, or cannot reach rank 0.
    """
    library = runtime.library_name(mpi_library.load())
    if not runtime.flavour().by_pmi:
        raise RuntimeError(_open_mpi_text(library, size))
    checkin = CheckIn(store, "bootstrap", rank, size)
    mine = json.dumps([node.identity(), os.getpid(), processes.above()])
    ranks = [json.loads(one) for one in checkin.gather("node", mine, timeout, _DOING)]
    offer = serve([one[0] for one in ranks], timeout) if rank == 0 else ""
    offer = checkin.gather("server", offer, timeout, _DOING)[0]
    _initialise(_connect(json.loads(offer), rank, timeout), rank, size, timeout.total_seconds())
    known = {(where, pid) for where, pid, _ in ranks}
    runtime.has_parents = any((where, pid) in known for where, _, above in ranks for pid in above)
    checkin.gather("world", "", timeout, _DOING)
    for what in ("node", "server"):
        checkin.forget(what)


def _open_mpi_text(library: str, size: int) -> str:
    if "ray" in sys.modules:
        return (
            f"init_process_group: Ray starts its own workers, and {library} cannot make a world of these {size}. Use "
            f"MPICH under Ray: pip install mpich, in an environment without Open MPI."
        )
    words = sys.orig_argv[2:] if sys.orig_argv[1:2] == ["-u"] else sys.orig_argv[1:]  # torchrun's, with its -u
    if words[:1] != ["-m"]:
        words = [Path(sys.argv[0]).name or "train.py", *sys.argv[1:]]
    program = shlex.join(one for one in words if not one.startswith(("--local-rank=", "--local_rank=")))  # launcher's
    if multiprocessing.parent_process() is not None:
        return (
            f"init_process_group: multiprocessing (mp.spawn) started these {size} processes, and {library} cannot make "
            f"a world of processes that its launcher did not start. Call the function itself in place of mp.spawn, "
            f"without rank and world_size, and start the job with mpirun -n {size} python {program}. (With MPICH, "
            f"pip install mpich, mpiplus also runs under mp.spawn.)"
        )
    return (
        f"init_process_group: these {size} processes were not started by MPI, and {library} cannot make a world of "
        f"them. Start the job with its own launcher: mpirun -n {size} python {program}, or mpiplus run -n {size} "
        f"{program}. (With MPICH, pip install mpich, mpiplus also runs under torchrun.)"
    )


def process_mapping(nodes: list[str]) -> str:
    """PMI's text for who shares a node with whom: runs of consecutive ranks, each (node, 1, length)."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    runs = ((numbers[node], len(list(run))) for node, run in itertools.groupby(nodes))
    return f"(vector,{','.join(f'({number},1,{length})' for number, length in runs)})"


def serve(nodes: list[str], timeout: timedelta) -> str:
    """Start the server; what the others must know of it."""
    one_node = len(set(nodes)) == 1
    job = {
        "address": "127.0.0.1" if one_node else "",
        "size": len(nodes),
        "secret": secrets.token_hex(16),
        "mapping": process_mapping(nodes),
        "seconds": timeout.total_seconds(),
    }
    server = subprocess.Popen(
        python_command("from torchmpi_plugin.lifecycle.pmi_server import main; main()"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C in the terminal must leave it to the ranks' MPI_Finalize
    )
    assert server.stdin is not None and server.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and says no port
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.close()
    port = int(server.stdout.readline() or 0)
    server.stdout.close()
    server.returncode = 0  # it outlives this process: nobody waits for it
    if not port:
        raise DistBackendError(f"{_DOING}: the server on rank 0 did not start")
    return json.dumps([node.addresses(one_node), port, job["secret"]])


def _connect(offer: list[Any], rank: int, timeout: timedelta) -> socket.socket:
    addresses, port, secret = offer
    try:
        connection = call(addresses, port, secret, min(30.0, timeout.total_seconds()))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{rank}\n".encode())
    except OSError as error:
        raise DistBackendError(
            f"{_DOING}: rank {rank} cannot reach rank 0 on port {port} ({error}); check the network"
        ) from error
    return connection


def _initialise(connection: socket.socket, rank: int, size: int, seconds: float) -> None:
    """MPI_Init, told about its peers. The variables go again: a child process must not use our connection.

    Those of a launcher that started torchrun are out of MPI's sight meanwhile.
    """
    # Detached: it must outlive Python, whose end comes before MPI_Finalize.
    pmi.connection = connection.detach()
    told = {"PMI_FD": pmi.connection, "PMI_RANK": rank, "PMI_SIZE": size}
    inherited = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_MPI_VARIABLES)}
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        runtime.start_within(seconds)
    finally:
        for name in told:
            del os.environ[name]
        os.environ.update(inherited)
