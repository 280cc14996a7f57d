"""MPI with less than MPI_THREAD_MULTIPLE: calls of MPI's that never overlap, or come from one thread only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import mpi4py
from steps import ME, SIZE, check_works, groups_made_by, raises, run

#: What the package calls through mpi4py while a group is made, used and freed.
CALLS = {"Create_group", "Iallgather", "Iallgatherv", "Test", "Iprobe", "Free"}


def serialized() -> None:
    """While a communicator is made or freed through mpi4py, the engine's thread makes no calls."""
    mpi4py.rc.thread_level = "serialized"
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import torchmpi_plugin
    from torchmpi_plugin.mpi import runtime

    dist.init_process_group("mpiplus")
    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED, "this MPI provides more than it is asked for"
    lib, seen = runtime.shim().lib, []

    def is_locked() -> bool:
        """Whether another thread would have to wait with its MPI calls."""
        entered = threading.Event()

        def enter() -> None:
            lib.mpp_lock()
            entered.set()
            lib.mpp_unlock()

        threading.Thread(target=enter, daemon=True).start()
        return not entered.wait(0.2)

    class Watched:
        """A communicator or request of mpi4py's that looks, in each call of MPI's, whether it is the only one."""

        def __init__(self, thing: object) -> None:
            self._thing = thing

        def __getattr__(self, name: str) -> object:
            if name in CALLS:
                seen.append((name, is_locked()))
            found = getattr(self._thing, name)
            return (lambda *arguments: Watched(found(*arguments))) if name.startswith("Iallgather") else found

    mpi_runtime_handle = runtime.handle_of
    runtime.handle_of = lambda thing: mpi_runtime_handle(getattr(thing, "_thing", thing))
    pending = dist.irecv(torch.ones(3), (ME - 1) % SIZE, tag=3)  # so the engine's thread has something to ask MPI for
    with groups_made_by(lambda make: lambda base, *arguments: Watched(make(Watched(base), *arguments))):
        group = dist.new_group()
    check_works(group)
    torchmpi_plugin.get_comm(group)
    dist.destroy_process_group(group)
    assert {name for name, _ in seen} == CALLS, seen
    assert all(locked for _, locked in seen), seen
    dist.send(torch.ones(3), (ME + 1) % SIZE, tag=3)
    pending.wait()
    check_works()
    dist.destroy_process_group()


def funneled() -> None:
    """Only the main thread may call MPI: others are told so, before they do."""
    mpi4py.rc.thread_level = "funneled"
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpiplus")
    group = dist.new_group()
    tensor = torch.zeros(1 << 16)
    work = dist.irecv(tensor, (ME - 1) % SIZE)

    def elsewhere() -> None:
        for doing in (work.wait, lambda: dist.barrier(group), group.shutdown):
            with raises(RuntimeError, "group '.*main thread only"):
                doing()
        assert work.is_completed() in (False, True)  # does not ask MPI, so does not hurry anything

    with ThreadPoolExecutor(1) as another:
        another.submit(elsewhere).result()
    half = dist.irecv(torch.zeros(3, dtype=torch.float16), (ME - 1) % SIZE, tag=1)
    for future in (work.get_future(), half.get_future()):  # C++, which waits here, does not ask us to call MPI
        for wait in (future.then(lambda done: done.value()).wait, lambda one=future: torch.futures.wait_all([one])):
            with raises(RuntimeError, "recv of .* from rank .* main thread only.* call wait"):
                wait()
    dist.barrier(group)  # no message comes before wait() was called elsewhere, where it would find nothing to do
    dist.send(torch.ones(1 << 16), (ME + 1) % SIZE)
    dist.send(torch.ones(3, dtype=torch.float16), (ME + 1) % SIZE, tag=1)
    assert work.get_future().wait()[0] is tensor
    assert half.get_future().wait()[0].tolist() == [1, 1, 1]
    assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0].unique().tolist() == [SIZE]  # as DDP waits
    check_works(group)
    dist.destroy_process_group()


run(globals())
