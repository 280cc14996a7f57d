"""The ways into a world."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from steps import ME, SIZE, TORCH_VARIABLES, check_works, raises, run, say

import torchmpi_plugin

MIRRORED = SIZE - 1 - ME  # this process's rank where torch's order is the opposite of MPI's
PATIENCE = timedelta(seconds=60)


def agreed(make) -> object:
    """What MPI's rank 0 makes, on all ranks; only once MPI is running."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.bcast(make() if MPI.COMM_WORLD.rank == 0 else None)


def everybody_has_left() -> None:
    """Nobody connects to a port where the store of the world before may still listen."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def check_world(rank: int) -> None:
    """This process has that rank, its own or the mirrored one, and so it is in MPI's communicator of the world."""
    from mpi4py import MPI

    assert (dist.get_rank(), dist.get_world_size()) == (rank, SIZE)
    check_works()
    comm = torchmpi_plugin.get_comm()
    assert (comm.rank, comm.size) == (rank, SIZE)
    order = comm.allgather(MPI.COMM_WORLD.rank)
    assert order in (list(range(SIZE)), list(range(SIZE))[::-1]), order
    assert order[rank] == ME, order


def cycle(name: str, expected: int, backend: str = "mpiplus", **arguments) -> None:
    """Into a world, a look around, and out again."""
    say(f"init: {name}")
    dist.init_process_group(backend, timeout=PATIENCE, **arguments)
    if backend == "mpiplus":
        check_world(expected)
        from torch.distributed.nn.functional import all_gather, reduce  # imported in the first world of the process

        part = torch.full((2,), 1.0 + ME, requires_grad=True)
        (sum(all_gather(part)) + reduce(part, 0)).sum().backward()
        assert part.grad is not None
        assert part.grad.tolist() == [SIZE + 1.0] * 2
        # ranks now count different numbers of groups, which the next world must not mind
        dist.new_group([SIZE - 1])
        check_works(dist.new_group())
    else:
        check_works()
    dist.destroy_process_group()
    assert not dist.is_initialized()


def set_rendezvous(rank: int, **more: object) -> None:
    """The four variables as torchrun sets them (or some, where the others are None)."""
    values = {"RANK": rank, "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", **more}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def check_exported() -> None:
    """One node: the local ranks are the ranks."""
    exported = {"RANK": ME, "WORLD_SIZE": SIZE, "LOCAL_RANK": ME, "LOCAL_WORLD_SIZE": SIZE, "NODE_RANK": 0}
    for name, value in exported.items():
        assert os.environ[name] == str(value), (name, os.environ[name])
    shared = [(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])]
    assert agreed(lambda: shared) == shared


def every_way(port: str, other_port: str) -> None:
    """With nothing set, then each explicit way, one after the other in one process."""
    assert not set(TORCH_VARIABLES) & set(os.environ), "the test's own environment is not clean"
    cycle("nothing set", ME)
    check_exported()
    cycle("mpi://", ME, init_method="mpi://")
    cycle("mpi:// with rank and size", MIRRORED, init_method="mpi://", rank=MIRRORED, world_size=SIZE)
    cycle("gloo with the exported variables", ME, backend="gloo")
    cycle("nothing given after gloo", ME)
    cycle("tcp://", MIRRORED, init_method=f"tcp://127.0.0.1:{port}", rank=MIRRORED, world_size=SIZE)
    directory = Path(str(agreed(tempfile.mkdtemp)))
    url = f"file://{directory / 'store'}"
    cycle("file://", MIRRORED, init_method=url, rank=MIRRORED, world_size=SIZE)
    store = dist.FileStore(str(directory / "own-store"), SIZE)
    cycle("store=", MIRRORED, store=store, rank=MIRRORED, world_size=SIZE)
    set_rendezvous(MIRRORED, MASTER_ADDR=None, MASTER_PORT=None)
    cycle("only RANK and WORLD_SIZE", MIRRORED)
    set_rendezvous(MIRRORED, MASTER_PORT=other_port)
    cycle("env:// in the opposite order", MIRRORED, init_method="env://")


def environment_given(port: str) -> None:
    """What the user set, before anything of ours ran, is obeyed and kept."""
    set_rendezvous(MIRRORED, MASTER_PORT=port, NODE_RANK=7, LOCAL_RANK=5)
    given = {name: os.environ[name] for name in TORCH_VARIABLES if name in os.environ}
    cycle("env:// at first", MIRRORED)
    for name, value in given.items():
        assert os.environ[name] == value, (name, value, os.environ[name])
    assert os.environ["LOCAL_WORLD_SIZE"] == str(SIZE)
    everybody_has_left()
    cycle("env:// again", MIRRORED)
    cycle("mpi:// past the variables", ME, init_method="mpi://")


def one_process() -> None:
    """Plain python gives a world of one."""
    assert not set(TORCH_VARIABLES) & set(os.environ)
    for _ in range(2):
        cycle("plain python", 0)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


def mistakes(directory: str) -> None:
    """Wrong sizes and ranks are explained, and after them a right init works."""
    wrong_size = rf"world_size is {SIZE + 3}, but MPI started {SIZE} ranks"
    for init_method in ("mpi://", "env://"):
        with raises(ValueError, wrong_size):
            dist.init_process_group("mpiplus", init_method=init_method, world_size=SIZE + 3, rank=ME)
    os.environ["WORLD_SIZE"] = str(SIZE + 3)
    with raises(ValueError, wrong_size):
        dist.init_process_group("mpiplus")
    del os.environ["WORLD_SIZE"]
    with raises(ValueError, rf"rank {SIZE} is out of range"):
        dist.init_process_group("mpiplus", init_method="mpi://", world_size=SIZE, rank=SIZE)
    store = dist.FileStore(f"{directory}/alone-{ME}", 1)
    with raises(ValueError, rf"world_size is 1, but MPI started {SIZE} ranks"):
        dist.init_process_group("mpiplus", store=store, world_size=1, rank=0)
    with raises(dist.DistBackendError, r"rank 0 given to several processes"):
        dist.init_process_group("mpiplus", init_method="mpi://", world_size=SIZE, rank=0)
    store = dist.FileStore(f"{directory}/shared", SIZE)
    with raises(dist.DistBackendError, r"rank 1 did not come"):
        dist.init_process_group("mpiplus", store=store, world_size=SIZE, rank=0, timeout=timedelta(seconds=2))
    cycle("after all mistakes", ME)


def refused() -> None:
    """An init that fails and is caught: the program ends as if it had never asked."""
    with raises(ValueError, "world_size is"):
        dist.init_process_group("mpiplus", init_method="mpi://", world_size=SIZE + 1, rank=ME)


def other_backends() -> None:
    """gloo keeps torch's own error and starts no MPI; prints the error, to be compared."""
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        say(f"gloo says: {error}")
    else:
        raise AssertionError("gloo initialised itself out of nothing")
    assert "mpi4py.MPI" not in sys.modules
    assert not set(TORCH_VARIABLES) & set(os.environ)


def mixed() -> None:
    """mpiplus cannot share a group with another backend, and says so; by itself it may be named with its device."""
    other_backends()
    for backends in ("cpu:mpiplus,cuda:gloo", "cpu:gloo,cuda:mpiplus"):
        with raises(RuntimeError, "cannot combine mpiplus with other backends", "new_group"):
            dist.init_process_group(backends)
        assert not dist.is_initialized()
    assert "mpi4py.MPI" not in sys.modules, "ranks have met: one may wait in gloo for one that was refused"
    dist.init_process_group("cpu:mpiplus")
    check_works()
    check_works(dist.new_group(backend="gloo"))
    check_works(dist.new_group())
    dist.destroy_process_group()


def check_world_on(comm, *group: int) -> None:
    """A world of the ranks of a communicator, which are these of MPI's, from the beginning to its end."""
    dist.init_process_group("mpiplus", timeout=PATIENCE, pg_options=torchmpi_plugin.Options(comm=comm))
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert torchmpi_plugin.get_comm().allgather(ME) == list(group)
    check_works()
    dist.destroy_process_group()


def reused_numbers() -> None:
    """MPI gives a freed communicator's number to the next one, which is another; one is left to MPI_Finalize."""
    from mpi4py import MPI

    for _ in range(3):
        for colour, group in ((ME % 2, range(ME % 2, SIZE, 2)), (ME // 2, range(ME // 2 * 2, ME // 2 * 2 + 2))):
            comm = MPI.COMM_WORLD.Split(colour, ME)
            check_world_on(comm, *group)
            check_world_on(comm, *group)
            comm.Free()
    check_world_on(MPI.COMM_WORLD, *range(SIZE))
    check_world_on(MPI.COMM_SELF, ME)
    check_world_on(MPI.COMM_WORLD.Split(ME % 2, ME), *range(ME % 2, SIZE, 2))


def finalised_by_the_program() -> None:
    """MPI_Finalize deletes the attributes of communicators that are left, while Python is there."""
    from mpi4py import MPI

    check_world_on(MPI.COMM_SELF, ME)
    check_world_on(MPI.COMM_WORLD.Split(ME % 2, ME), *range(ME % 2, SIZE, 2))
    check_world_on(MPI.COMM_WORLD, *range(SIZE))
    MPI.Finalize()


run(globals())
