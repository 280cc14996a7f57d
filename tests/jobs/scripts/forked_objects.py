"""A forked child calls what needs MPI or another process, of each object that it inherits, while those are in use."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say

import torchmpi_plugin
from torchmpi_plugin.api.backend import group_of
from torchmpi_plugin.group.process_group import ProcessGroupMPI
from torchmpi_plugin.torch_internals import has_python_backends

#: A call in a child that is not over by then has hung.
SECONDS = 20

ONE = torch.ones(SIZE)
LISTS = [torch.ones(1) for _ in range(SIZE)]
BY_NAME: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), ([ONE],)),
    **dict.fromkeys(("_allgather_base", "all_gather_single", "allgather_into_tensor"), (ONE, torch.ones(1))),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor"), (torch.ones(1), ONE)),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), (ONE, ONE, [], [])),
    "allgather": ([LISTS], [torch.ones(1)]),
    "reduce_scatter": ([torch.ones(1)], [LISTS]),
    "alltoall": (LISTS, LISTS),
    "gather": ([LISTS] if ME == 0 else [[]], [torch.ones(1)]),
    "scatter": ([torch.ones(1)], [LISTS] if ME == 0 else [[]]),
    "send": ([ONE], (ME + 1) % SIZE, 3),
    "recv": ([ONE], (ME + 1) % SIZE, 3),
    "recv_anysource": ([ONE], 3),
    "barrier": (),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), ([ONE], [torch.ones(1)])),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), ([torch.ones(1)], [ONE])),
    "allgather_coalesced": ([[torch.ones(1)] for _ in range(SIZE)], [torch.ones(1)]),
    "monitored_barrier": (),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), (ONE, torch.ones(1), dist.GatherOptions())),
    "allreduce_sparse": ([ONE.to_sparse()],),
}
#: Calls of c10d's methods, and what else needs MPI or another process, by the kind of object.
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "group": {**BY_NAME, "abort": (), "new_window": (ONE,), "shrink": ([0],)},
    "Work": dict.fromkeys(("wait", "synchronize", "is_completed", "get_future"), ()),
    "window": {"tensor_register": (ONE,), "put": (ONE, 0, 0, False), "signal": (0, False), "wait_signal": (0, False)},
    "helpers": {
        **dict.fromkeys(("get_comm", "shrink", "monitored_barrier", "barrier"), ()),
        **dict.fromkeys(("scan", "exscan", "all_reduce", "all_gather", "all_gather_object"), (ONE,)),
        **dict.fromkeys(("gather_from_all_ranks", "compute_and_broadcast"), (int,)),
    },
}


def try_all(kind: str, target: Any) -> None:
    """In a child: each call is refused; one that hangs ends it, and its name is the last word."""
    calls = {name: given for name, given in REFUSED[kind].items() if hasattr(target, name)}
    for name, given in calls.items():
        signal.alarm(SECONDS)
        os.environ["TRIES"] = name
        with raises(RuntimeError, "group '.*forked" if name == "allreduce" else "forked"):
            getattr(target, name)(*given)
    say(f"{kind}: {len(calls)} methods are refused")


def in_child(kind: str, action: Callable[[], None]) -> None:
    def tell(*_: object) -> None:
        say(f"child: {kind}.{os.environ.get('TRIES')} hangs")
        os._exit(2)

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, tell)
        signal.alarm(SECONDS)
        try:
            action()
            os._exit(0)
        except BaseException as error:
            say(f"child: {kind}.{os.environ.get('TRIES')}: {type(error).__name__}: {error}")
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, kind


def inherited(api_mode: str) -> None:
    """Objects of each kind, with operations pending whose messages must reach the parent."""
    options = torchmpi_plugin.Options(api_mode="dispatcher") if api_mode == "dispatcher" else None
    dist.init_process_group("mpiplus", pg_options=options)
    check_works()
    world = dist.group.WORLD
    assert isinstance(group_of(world), ProcessGroupMPI)
    ours: Any = group_of(world)  # it has more of c10d's forms than its annotations
    comm = torchmpi_plugin.get_comm()
    right, left = (ME + 1) % SIZE, (ME - 1) % SIZE
    complete = ours.allreduce([torch.ones(1 << 16)])
    complete.wait()
    message = torch.zeros(1 << 16)
    receive = ours.recv([message], left, 9)
    coalesced = ours._end_coalescing(torch.device("cpu"))
    future = receive.get_future()
    summed = torch.ones(1 << 18)
    late = ours.allreduce([summed]) if ME == 0 else None  # pending: the others call it later
    objects: list[tuple[str, Any]] = [("group", ours), ("Work", receive), ("helpers", torchmpi_plugin)]
    objects += [("helpers", torchmpi_plugin.dist), *([("Work", late)] if late is not None else [])]
    if has_python_backends():
        objects.append(("window", ours.new_window(torch.ones(4))))
    for kind, target in objects:
        in_child(kind, functools.partial(try_all, kind, target))

    def ask_what_is_complete() -> None:
        for work in (complete, coalesced):
            work.wait()
            assert work.is_completed() and not future.done()
        assert (ours.rank(), ours.size()) == (ME, SIZE) == (torchmpi_plugin.dist.get_global_rank(), SIZE)

    in_child("complete Work", ask_what_is_complete)
    child = os.fork()
    if child == 0:  # destructors, and the end of Python, with everything still held
        del receive, late, complete, coalesced, future, objects, world, ours, comm
        raise SystemExit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    send = ours.send([torch.full((1 << 16,), float(ME))], right, 9)
    receive.wait()
    send.wait()
    assert message[-1] == left, message
    if late is None:
        late = ours.allreduce([summed])
    late.wait()
    assert summed[-1] == SIZE
    check_works()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(globals())
