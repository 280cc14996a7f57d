"""Programs that use mpi4py themselves."""

from __future__ import annotations

import atexit
import ctypes
import sys
import time

import mpi4py
import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say, warnings_told

import torchmpi_plugin


def finalize_last() -> None:
    """MPI_Finalize after everything of ours: an error of MPI if that has finalised already, necessary if not.

    libc's exit handlers run in the reverse order of their registration, when Python is no longer there.
    """
    with open("/proc/self/maps") as maps:
        library = next(path for line in maps if "/libmpi" in (path := line.split()[-1]))
    address = ctypes.cast(ctypes.CDLL(library).MPI_Finalize, ctypes.c_void_p)
    assert ctypes.CDLL(None).on_exit(address, None) == 0


def initialised_before() -> None:
    """MPI that the program started is left running, through two worlds and to the program's end."""
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    assert MPI.Is_initialized()
    finalize_last()
    dist.init_process_group("mpiplus")
    check_works()
    dist.destroy_process_group()
    assert MPI.COMM_WORLD.allreduce(1) == SIZE
    dist.init_process_group("mpiplus")
    check_works()


def initialised_by_us() -> None:
    """With mpi4py.rc.initialize off, MPI is ours to start and to end."""
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    assert not MPI.Is_initialized()
    finalize_last()
    dist.init_process_group("mpiplus")
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    check_works()
    atexit.register(lambda: say(f"in the last exit handler: {MPI.COMM_WORLD.allreduce(1)} ranks"))


def thread_level(name: str) -> None:
    """Everything works at a lower level, and the log says once what it costs."""
    mpi4py.rc.thread_level = name
    from mpi4py import MPI

    told = warnings_told()
    wanted = {"single": MPI.THREAD_SINGLE, "funneled": MPI.THREAD_FUNNELED, "serialized": MPI.THREAD_SERIALIZED}[name]
    level = MPI.Query_thread()
    assert level >= wanted
    say(f"asked for {wanted}, provided {level}, multiple is {MPI.THREAD_MULTIPLE}")
    dist.init_process_group("mpiplus")
    group = dist.new_group()
    check_works()
    check_works(group)
    expected = [] if level >= MPI.THREAD_MULTIPLE else [f"MPI_THREAD_{name.upper()}"]
    assert len(told) == len(expected), told
    assert all(word in message for word, message in zip(expected, told, strict=True))
    asynchronous(group)
    check_works()
    dist.destroy_process_group()


def asynchronous(group: dist.ProcessGroup) -> None:
    """By wait() and by is_completed(), also in the opposite order on the two groups, also when dropped."""
    for finish in ("wait", "is_completed"):
        tensors = [torch.full((1000,), float(ME + 1)) for _ in range(4)]
        pairs = list(zip(tensors, (None, group, None, group), strict=True))
        if ME == 0:  # another order of groups, the same within each
            pairs = pairs[1::2] + pairs[::2]
        works = [dist.all_reduce(tensor, group=one, async_op=True) for tensor, one in pairs]
        for work in works[::-1]:
            if finish == "wait":
                work.wait()
            while not work.is_completed():
                time.sleep(0.0001)
        assert all(tensor[0] == SIZE * (SIZE + 1) / 2 for tensor in tensors), tensors
    for _ in range(20):
        dist.all_reduce(torch.ones(10), async_op=True)  # dropped
    dist.barrier()


def own_communicators() -> None:
    """Two independent worlds in one job, each in the opposite of MPI's order."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(ME % 2, key=-ME)
    dist.init_process_group("mpiplus", pg_options=torchmpi_plugin.Options(comm=half))
    assert (dist.get_rank(), dist.get_world_size()) == (half.rank, SIZE // 2)
    check_works()
    members = [None] * dist.get_world_size()
    dist.all_gather_object(members, ME)
    assert members == [rank for rank in range(SIZE)[::-1] if rank % 2 == ME % 2], members
    check_comm(None, members)
    group = dist.new_group([1, 0])  # torch sorts the ranks of a group
    check_comm(group, members)
    check_works(group)
    assert half.allreduce(1) == half.size  # ours is a duplicate
    dist.destroy_process_group()
    reversed_world(world)


def check_comm(group: dist.ProcessGroup | None, members: list) -> None:
    """The communicator has torch's order, is the same at each call, and bears the program's own use."""
    comm = torchmpi_plugin.get_comm(group)
    assert comm is torchmpi_plugin.get_comm(group)
    assert (comm.rank, comm.size) == (dist.get_rank(group), dist.get_world_size(group))
    assert comm.allgather(ME) == members
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    assert comm.allreduce(1) == comm.size  # while an operation of ours is under way
    work.wait()


def reversed_world(world) -> None:
    """All ranks again, through a communicator in the opposite order; wrong options are refused before that."""
    with raises(TypeError, "torchmpi_plugin.Options"):
        dist.init_process_group("mpiplus", pg_options={"comm": world})
    mirrored = world.Split(0, key=-ME)
    dist.init_process_group("mpiplus", pg_options=torchmpi_plugin.Options(comm=mirrored))
    assert dist.get_rank() == SIZE - 1 - ME
    check_works()
    check_comm(None, list(range(SIZE))[::-1])
    dist.destroy_process_group()
    mirrored.Free()


assert "mpi4py.MPI" not in sys.modules
run(globals())
