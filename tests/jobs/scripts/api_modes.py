"""Both API modes, and what torch 2.15 asks of a group; the stage newest_torch runs tests/mpi in both."""

from __future__ import annotations

import json
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from steps import ME, check_works, raises, run, say
from torch._C import _distributed_c10d as c10d

import torchmpi_plugin
from torchmpi_plugin import Options

SHORT = timedelta(seconds=3)


def check_training() -> None:
    """DDP calls the group from C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    model(torch.full((1, 3), float(ME))).sum().backward()
    assert model.module.weight.grad.tolist() == [[(dist.get_world_size() - 1) / 2] * 3] * 2


def shared(backends: str, own: str) -> None:
    """A group with other backends: torch's own, in which mpiplus serves one kind of device."""
    dist.init_process_group(backends)
    world = dist.group.WORLD
    assert type(world) is dist.ProcessGroup, type(world)
    assert torchmpi_plugin.get_comm().Get_size() == dist.get_world_size()
    if own == "cpu":
        check_works()
        check_training()
        check_works(dist.new_group())
        check_works(dist.new_group(backend="mpiplus"))
        torchmpi_plugin.monitored_barrier()
    else:
        assert world._get_backend(torch.device(own)).name() == "mpiplus"
        check_works()  # on gloo
    dist.destroy_process_group()


def chosen() -> None:
    """The user's choice: torch's own process group above ours."""
    with raises(ValueError, "api_mode", "direct.*dispatcher", "'neither'"):
        Options(api_mode="neither")
    dist.init_process_group("mpiplus", pg_options=Options(api_mode="dispatcher"))
    assert type(dist.group.WORLD) is dist.ProcessGroup
    check_works()
    check_training()
    half = dist.new_group(pg_options=Options(api_mode="dispatcher"))
    check_works(half)
    dist.destroy_process_group(half)
    check_works()
    dist.destroy_process_group()


def a_device(kind: str) -> None:
    """``device_id=`` binds the group to a device."""
    dist.init_process_group("mpiplus", device_id=torch.device(kind, 0))
    check_works()
    check_works(dist.new_group())
    dist.destroy_process_group()


def split(api_mode: str) -> None:
    """torch.distributed.split_group, with ranks that are in no part."""
    dist.init_process_group("mpiplus", pg_options=Options(api_mode=api_mode))
    if api_mode == "dispatcher" and ME == 2:
        with raises(NotImplementedError, "split_group", "rank 2", "new_group"):
            dist.split_group(split_ranks=[[1, 0]])
    else:
        half = dist.split_group(split_ranks=[[1, 0]])
        assert (half is dist.GroupMember.NON_GROUP_MEMBER) == (ME == 2)
    if ME < 2:
        assert dist.get_rank(half) == 1 - ME
        check_works(half)
        dist.destroy_process_group(half)
    parts = dist.split_group(split_ranks=[[0, 1], [2]], timeout=SHORT)
    check_works(parts)
    dist.destroy_process_group()


def hooks(api_mode: str) -> None:
    """Hooks see every operation, and the operations stay what they are."""
    dist.init_process_group("mpiplus", pg_options=Options(api_mode=api_mode))
    group, seen = dist.group.WORLD, []
    check_works()
    group.register_pre_hook(1, lambda call: seen.append(("pre", call.name.name, call.op_id)))
    group.register_post_hook(2, lambda call: seen.append(("post", call.name.name, call.op_id)))
    dist.all_reduce(torch.ones(2))
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    assert api_mode == "dispatcher" or work.is_completed()
    names = [(when, name) for when, name, _ in seen]
    assert names == [("pre", "ALLREDUCE"), ("post", "ALLREDUCE")] * 2, seen
    check_works()
    check_training()
    assert {"ALLREDUCE", "ALLGATHER", "BARRIER", "SEND", "RECV"} <= {name for _, name, _ in seen}, seen
    before, after = ([call[1:] for call in seen if call[0] == when] for when in ("pre", "post"))
    assert sorted(before) == sorted(after), set(before) ^ set(after)
    del seen[:]
    group.allgather_into_tensor_coalesced([torch.ones(3), torch.ones(3)], [torch.ones(1), torch.ones(1)]).wait()
    assert [name for _, name, _ in seen] == ["ALLGATHER_INTO_TENSOR_COALESCED"] * 2, seen  # an old name, and one call
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    before = len(seen)
    check_works()
    assert len(seen) == before
    dist.destroy_process_group()


def not_a_number() -> None:
    """TORCH_DIST_NAN_CHECK=1: whoever passes a NaN hears of it before anything is sent."""
    dist.init_process_group("mpiplus")
    check_works()
    with raises(RuntimeError, "(?i)nan"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]))
    check_works()
    dist.destroy_process_group()


def abort_hooks() -> None:
    """Called before an abort, and when an operation fails; what they raise does not hide that."""
    dist.init_process_group("mpiplus")
    group, calls = dist.new_group(timeout=SHORT), []

    def bad() -> None:
        raise ValueError("of the hook's own")

    assert group.get_error() == c10d.ErrorType.SUCCESS
    group.register_abort_hook(1, lambda: calls.append(1))
    group.register_abort_hook(2, bad)
    group.register_abort_hook(3, lambda: calls.append(3))
    group.unregister_abort_hook(3)
    if ME == 0:
        with raises(dist.DistBackendError, "timed out"):
            dist.all_reduce(torch.ones(2), group=group)
        assert calls == [1]
        assert group.get_error() == c10d.ErrorType.TIMEOUT
    dist.barrier()
    group.abort()
    assert calls[-1] == 1
    dist.destroy_process_group()


def more_time() -> None:
    """_add_ephemeral_timeout: until the first operation that comes after is complete."""
    dist.init_process_group("mpiplus")
    group = dist.new_group(timeout=SHORT)
    group._add_ephemeral_timeout(timedelta(seconds=60))
    if ME == 0:
        time.sleep(1.5 * SHORT.total_seconds())
    dist.barrier(group)  # would not have been enough
    if ME == 0:
        time.sleep(2 * SHORT.total_seconds())
    else:
        with raises(dist.DistBackendError, "timeout is 3 s"):
            dist.barrier(group)
    dist.barrier()
    dist.destroy_process_group()


def gathered() -> None:
    """gather_single, torch 2.15's gather into one tensor."""
    dist.init_process_group("mpiplus")
    size = dist.get_world_size()
    for root in range(size):
        rows = torch.zeros(size, 2, 3)
        # Not contiguous: its elements go where the tensor has them.
        output = rows.transpose(1, 2).contiguous().transpose(1, 2) if root == ME else None
        dist.gather_single(torch.full((2, 3), float(ME)), output, dst=root)
        if root == ME:
            assert [row.unique().tolist() for row in output] == [[float(rank)] for rank in range(size)]
    if ME == 0:
        with raises(ValueError, "gather_single", "elements"):
            dist.gather_single(torch.ones(2), torch.ones(2 * size + 1), dst=0)
    check_works()
    dist.destroy_process_group()


def recorded(directory: str, dumps: str) -> None:
    """An operation that one rank does not call: each rank's flight recorder is on disk, and tells it."""
    dist.init_process_group("mpiplus")
    check_works()
    dist.group.WORLD.set_timeout(SHORT)
    asked = ((pickle, c10d._dump_fr_trace), (json, c10d._dump_fr_trace_json)) if dumps == "dumps" else ()
    for form, ask in asked:
        names = [entry["profiling_name"] for entry in form.loads(ask(backend="mpiplus"))["entries"][:2]]
        assert names == ["mpiplus:all_reduce", "mpiplus:all_gather"]
    if ME == 1:
        time.sleep(3 * SHORT.total_seconds())
    else:
        with raises(dist.DistBackendError, "timed out"):
            dist.all_reduce(torch.ones(7, 3, dtype=torch.bfloat16))
    trace = pickle.loads((Path(directory) / f"trace_{ME}").read_bytes())
    assert trace["pg_config"]["0"]["name"] == "0"
    assert trace["pg_config"]["0"]["ranks"] == str(list(range(dist.get_world_size())))
    last = trace["entries"][-1]
    if ME != 1:
        told = {key: last[key] for key in ("profiling_name", "input_sizes", "input_dtypes", "state", "retired")}
        assert told == {
            "profiling_name": "mpiplus:all_reduce",
            "input_sizes": [[7, 3]],
            "input_dtypes": ["BFloat16"],
            "state": "scheduled",
            "retired": False,
        }, last
        assert last["frames"][0]["name"] == "recorded"
    assert {entry["state"] for entry in trace["entries"][:-1]} == {"completed"}
    say(f"{os.getpid()} has told")


run(globals())
