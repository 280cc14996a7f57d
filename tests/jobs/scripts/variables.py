"""Variables that are wrong: what is said, by whom, and that nobody has waited by then."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say

from torchmpi_plugin import Options
from torchmpi_plugin.node import node
from torchmpi_plugin.store.checkin import CheckIn

COMPLETE = {"RANK": str(ME), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


#: Set for a while.
variables = partial(mock.patch.dict, os.environ)


def check_mpi_is_not_running() -> None:
    """Whoever is wrong has not begun to meet the others."""
    assert "mpi4py.MPI" not in sys.modules


#: Others are in tests/unit/test_settings.py.
WRONG_SETTINGS = {"MPIPLUS_EXIT_GRACE": "nan", "MPIPLUS_COLLECTIVES": "banana"}


def wrong_settings(directory: str) -> None:
    """On all ranks, in every way; then all is put right."""
    for name, value in WRONG_SETTINGS.items():
        for init_method in (None, "mpi://"):
            with variables(**{name: value}), raises(ValueError, f"{name} must be .*, not '{value}'"):
                dist.init_process_group("mpiplus", init_method=init_method)
    check_mpi_is_not_running()
    dist.init_process_group("mpiplus")
    check_works()
    dist.destroy_process_group()
    # Ways of torch's own: there it is noticed when the group is made, on the rank that is wrong.
    store = dist.FileStore(f"{directory}/store", SIZE)
    if ME == 0:
        with variables(MPIPLUS_CUDA="banana"), raises(ValueError, "MPIPLUS_CUDA must be one of .*, not 'banana'"):
            dist.init_process_group("mpiplus", store=store, rank=0, world_size=SIZE)
    else:
        with raises(dist.DistBackendError, "rank 0 did not come"):
            dist.init_process_group("mpiplus", store=store, rank=ME, world_size=SIZE, timeout=timedelta(seconds=3))


def works() -> None:
    """Or not, with what the test has set."""
    dist.init_process_group("mpiplus")
    check_works()
    dist.destroy_process_group()


#: Variable, value, what is allowed.
NO_NUMBERS = (
    *(("RANK", "abc", "0 or more"), ("RANK", "-1", "0 or more"), ("WORLD_SIZE", "abc", "1 or more")),
    *(("WORLD_SIZE", "0", "1 or more"), ("MASTER_PORT", "notaport", "from 0 to 65535")),
    ("MASTER_PORT", "70000", "from 0 to 65535"),
)


def wrong_torch_variables() -> None:
    """Alone, where mpiplus would add the others, and among all four, where torch would take over."""
    for others in ({}, COMPLETE):
        with variables(**others):
            for name, value, allowed in NO_NUMBERS:
                wanted = f"variable {name} must be an integer, {allowed}, not '{value}'"
                with variables(**{name: value}), raises(ValueError, wanted):
                    dist.init_process_group("mpiplus")
            with (
                variables(MASTER_ADDR="nosuchhost.invalid"),
                raises(ValueError, "variable MASTER_ADDR is 'nosuchhost.invalid', a name that is not known here: "),
            ):
                dist.init_process_group("mpiplus")
    with variables(**{**COMPLETE, "RANK": "7"}), raises(ValueError, f"rank 7 is out of range for world size {SIZE}"):
        dist.init_process_group("mpiplus")
    with variables(**{**COMPLETE, "MASTER_PORT": "0"}), raises(ValueError, "variable MASTER_PORT must be a port"):
        dist.init_process_group("mpiplus")
    with variables(**{**COMPLETE, "WORLD_SIZE": "abc"}), raises(ValueError, "^invalid literal for int.. with base 10"):
        dist.init_process_group("gloo")
    check_mpi_is_not_running()
    dist.init_process_group("mpiplus")
    check_works()


def same_rank(directory: str) -> None:
    """Everybody is told who has it: MPI rank, process and node."""
    Path(directory, f"pid-{ME}").write_text(str(os.getpid()))
    with variables(RANK="0"), raises(dist.DistBackendError, "rank 0 given to several processes") as caught:
        dist.init_process_group("mpiplus")
    for rank in range(SIZE):
        pid = Path(directory, f"pid-{rank}").read_text()
        assert f"rank 0 to MPI rank {rank} (process {pid} on {socket.gethostname()})" in str(caught[0]), caught
    assert re.search("variable RANK or as rank=", str(caught[0]))
    dist.init_process_group("mpiplus")
    check_works()


def port_in_use(method: str) -> None:
    """By another job."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        named: dict[str, Any] = {"rank": ME, "world_size": SIZE} if method != "env://" else {}
        os.environ.update({**COMPLETE, "MASTER_PORT": str(port)})
        dist.init_process_group("mpiplus", init_method=method.format(port), **named)


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def address_of_nobody() -> None:
    """That no node has, nor answers at; all are told by rank 0, before they give up."""
    with variables(MASTER_ADDR="203.0.113.7"), raises(dist.DistBackendError, "rank 0 could not open the store: "):
        dist.init_process_group("mpiplus", timeout=timedelta(seconds=8))


def rank_of_a_batch_script() -> None:
    """As Lightning reads the rank there, with mpirun. All are told: nobody waits for rank 0, or as it."""
    words = ("SLURM_PROCID=0", f"MPI's rank {ME} of {SIZE}", "mpiplus run or srun", "MPIEnvironment")
    for more in ({}, COMPLETE):
        with variables(**{**more, "RANK": "0", "SLURM_PROCID": "0"}), raises(dist.DistBackendError, *words):
            dist.init_process_group("mpiplus")
    with variables(SLURM_PROCID="0"), raises(dist.DistBackendError, *words):
        dist.init_process_group("mpiplus", init_method="tcp://127.0.0.1:29511", rank=0, world_size=SIZE)


def few_files(rank: str) -> None:
    """On one rank, which may be the one that has the store; rank 1 has none left for its last steps, nor at its end."""

    def limit(files: int) -> None:
        if int(rank) == ME:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, 48))

    limit(48)
    if rank == "0":
        with raises(dist.DistBackendError, "rank 0 could not open the store: only 48 files", "allow 64 or more"):
            dist.init_process_group("mpiplus")
        return
    connected_anew = CheckIn.connected_anew

    def without_files(checkin: CheckIn) -> CheckIn:
        limit(1)
        return connected_anew(checkin)

    with mock.patch.object(CheckIn, "connected_anew", without_files):
        dist.init_process_group("mpiplus", timeout=timedelta(seconds=20))
    check_works()


def backend_by_default() -> None:
    """A program that names none, and torch told which one to take (torchtitan); options by the backends' names."""
    dist.Backend.default_device_backend_map["cpu"] = "mpiplus"
    dist.init_process_group(pg_options={"nccl": object(), "mpiplus": Options(collectives="own")})
    check_works()


def through_torchcomms() -> None:
    """torch's switch, as it is where torchcomms is installed."""
    dist.distributed_c10d._use_torchcomms_enabled = lambda: True
    for method in (None, "mpi://"):
        with raises(RuntimeError, "TORCH_DISTRIBUTED_USE_TORCHCOMMS=0"):
            dist.init_process_group("mpiplus", init_method=method)
    check_mpi_is_not_running()


def timeouts() -> None:
    """By the helper that torch has for them, which must not warn."""
    dist.init_process_group("mpiplus")
    for group in (None, dist.new_group()):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Set timeout is now only supported")
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), group)
        ours: Any = group or dist.group.WORLD
        assert ours.timeout == timedelta(seconds=77)
    gloo = dist.new_group(backend="gloo")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), gloo)


def fewer_than_said() -> None:
    """The launcher has started one process, the variables say four: told before torch waits for them."""
    with raises(ValueError, "world_size is 4, but MPI started 1 rank", r"has started one process \(.*=1\): start 4"):
        dist.init_process_group("mpiplus")


def loopback() -> None:
    """Ranks on one node: other nodes cannot reach the store."""
    dist.init_process_group("mpiplus")
    check_works()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    assert _is_listening(store.port)
    others = [address for address in node.addresses(of_all_interfaces=True) if re.fullmatch(r"[\d.]+", address)]
    for address in others:
        with raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=5)
    say(f"asked {len(others)} other addresses")


run(globals())
