"""A forked child tries every public method of every object of mpiplus that it inherits, while they are in use."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, run, say

import torchmpi_plugin
from torchmpi_plugin.api.backend import group_of
from torchmpi_plugin.group.process_group import ProcessGroupMPI
from torchmpi_plugin.torch_internals import has_python_backends

#: A call in a child that is not over by then has hung.
SECONDS = 20

#: (zero_first and its like return a context here; their ``with`` is on any backend, and goes over torch's store.)
#: What needs neither MPI nor another process, and tells or notes something in this one.
HARMLESS = {
    "group": """
        rank size name getRank getSize getBackendName _get_backend_name getGroupName getGroupDesc group_name pg_name
        group_desc setGroupName setGroupDesc _set_group_name _set_group_desc _get_backend get_backend _has_hooks
        _set_default_backend get_group_store _get_sequence_number_for_group _set_sequence_number_for_group global_rank
        set_timeout _set_default_timeout _add_ephemeral_timeout _start_coalescing _end_coalescing
        register_pre_hook register_post_hook register_abort_hook unregister_abort_hook run_abort_hooks get_error
        unregister_pre_hook unregister_post_hook
        allocate_tensor supports_tensor_alloc comm_split_count perform_nocolor_split eager_connect_single_device
        arrivals break_off leave take_back_failed shutdown failed gave_up failure_of
        run_hooks attach as_backend get_abort_hooks bound_device_id _device_types _id _backend_id unbox boxed
        _get_backend_type _register_on_completion_hook _wait_for_pending_works _enable_collectives_timing
        _register_backend _allgather_coalesced time_estimate enable_collectives_timing get_group_rank
        get_mem_allocator mem_allocator set_abort_on_error abort_on_error
    """,
    "Work": "boxed unbox source_rank _source_rank elapsed own_duration _get_duration _get_op_type",
    "complete Work": """
        boxed unbox source_rank _source_rank elapsed wait synchronize block_current_stream is_completed is_success
        exception result get_future _get_duration _get_op_type
    """,
    "future": "__all__",  # torch's own: complete or not, it is memory of this process
    "window": "map_remote_tensor get_attr",
    "Options": "__all__",
    "helpers": """
        get_global_rank get_local_rank get_local_world_size get_node_rank get_world_size is_available is_distributed
        is_initialized is_main_process get_sampler zero_first run_local_rank_zero_first
        RankFailedError initialize_dist Options
    """,
}  # fmt: skip
#: torch's, which a group in Python does not have: what they raise is torch's affair.
NOT_OURS = {"get_future_result", "abort_hooks"}
#: Inside mpiplus: how its parts call each other, with arguments that nobody outside has.
INTERNAL = {"_pybind11_conduit_v1_", "complete", "resolve", "check_deadline", "abandon_aborted", "take_back"}


def arguments_of(call: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """One for each parameter that must be given."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return {}  # pybind's
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {parameter.name: given.get(parameter.name, torch.ones(2)) for parameter in wanted}


def one() -> torch.Tensor:
    return torch.ones(SIZE)


#: By the names of the parameters; and what pybind's methods take, by the names of the methods.
GIVEN = {
    "tensors": [one()], "input_tensors": [one()], "output": one(), "input": one(), "dst": 0, "src": 0,
    "tag": 0, "root": 0,
    "dst_rank": 0, "peer_rank": 0, "rank": 0, "ranks": [0], "new_ranks": [0, 1], "async_op": False,
    "timeout": timedelta(seconds=5),
    "target_offset_nelems": 0, "size": 4, "dtype": torch.float32, "device": torch.device("cpu"), "owning": True,
    "hook_id": 1, "hook": print, "obj": 1, "object": 1, "object_list": [1], "obj_list": [1], "fn": int, "group": None,
    "ranks_to_exclude": [0], "shrink_flags": 0, "store": None, "opts": None, "name": "name", "description": "words",
    "output_tensors": [[torch.ones(SIZE) for _ in range(SIZE)]], "dataset": [1, 2], "func": int, "value": 1.0,
}  # fmt: skip
LISTS = [torch.ones(1) for _ in range(SIZE)]
BY_NAME: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), ([one()],)),
    **dict.fromkeys(("_allgather_base", "all_gather_single", "allgather_into_tensor"), (one(), torch.ones(1))),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor"), (torch.ones(1), one())),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), (one(), one(), [], [])),
    "allgather": ([LISTS], [torch.ones(1)]),
    "reduce_scatter": ([torch.ones(1)], [LISTS]),
    "alltoall": (LISTS, LISTS),
    "gather": ([LISTS] if ME == 0 else [[]], [torch.ones(1)]),
    "scatter": ([torch.ones(1)], [LISTS] if ME == 0 else [[]]),
    "send": ([one()], (ME + 1) % SIZE, 3),
    "recv": ([one()], (ME + 1) % SIZE, 3),
    "recv_anysource": ([one()], 3),
    "barrier": (),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), ([one()], [torch.ones(1)])),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), ([torch.ones(1)], [one()])),
    "allgather_coalesced": ([[torch.ones(1)] for _ in range(SIZE)], [torch.ones(1)]),
    "monitored_barrier": (),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), (one(), torch.ones(1), dist.GatherOptions())),
    "allreduce_sparse": ([one().to_sparse()],),
}


def outcome(kind: str, call: Callable[..., Any], name: str) -> str:
    """How a child's call ends: "refused", or how else."""
    try:
        if name in BY_NAME and kind != "helpers":
            call(*BY_NAME[name])
        else:
            call(**arguments_of(call, GIVEN))
    except RuntimeError as error:
        return "refused" if "forked" in str(error) else f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    return "returned"


def public(target: Any, with_c10ds: bool) -> Iterator[str]:
    """Names of methods: those without an underscore, and of a group those of c10d's with one too."""
    c10ds = set(dir(dist.ProcessGroup)) if with_c10ds else set()
    for name in getattr(target, "__all__", dir(target)):
        if name.startswith("__") or (name.startswith("_") and name not in c10ds):
            continue
        with contextlib.suppress(Exception):
            if callable(getattr(target, name)) and not inspect.isclass(getattr(target, name)):
                yield name


def try_all(kind: str, target: Any) -> None:
    """In a child: each method is refused, or known to be harmless."""
    signal.alarm(0)
    allowed = set(HARMLESS[kind].split())
    tried, wrong = 0, 0
    for name in public(target, kind == "group"):
        if name in INTERNAL | NOT_OURS:
            continue
        signal.alarm(SECONDS)  # its own death then, with the name as the last word
        os.environ["TRIES"] = name
        found = outcome(kind, getattr(target, name), name)
        signal.alarm(0)
        tried += found == "refused"
        if found != "refused" and not {name, "__all__"} & allowed:
            say(f"child: {kind}.{name}: {found}")
            wrong = 1
    say(f"{kind}: {tried} methods are refused")
    os._exit(wrong)


def in_child(kind: str, target: Any) -> None:
    def tell(*_: object) -> None:
        say(f"child: {kind}.{os.environ.get('TRIES')} hangs")
        os._exit(2)

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, tell)
        try:
            try_all(kind, target)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, (kind, status)


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
    objects: list[tuple[str, Any]] = [
        ("group", ours),
        ("Work", receive),
        ("complete Work", complete),
        ("complete Work", coalesced),
        ("future", future),
        ("Options", torchmpi_plugin.Options()),
        ("helpers", torchmpi_plugin.dist),
        ("helpers", torchmpi_plugin),
    ]
    if late is not None:
        objects.append(("Work", late))
    if has_python_backends():
        objects.append(("window", ours.new_window(torch.ones(4))))
    for kind, target in objects:
        in_child(kind, target)
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
