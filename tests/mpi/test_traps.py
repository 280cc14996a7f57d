"""What PyTorch's own MPI backend gets wrong: its hangs, its silent errors, its crashes, its refusals.

Resources that it leaks are in test_resources.py, time limits that it ignores in test_timeouts.py.
"""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import Case
from expected import REDUCE_OPS
from operation_table import TABLE
from started import Failures

ERRORS = (ValueError, TypeError, RuntimeError)  # DistBackendError is a RuntimeError
HUGE = 2**31 + 8


def sum_of_ranks(group=None, ranks=None) -> None:
    """An all_reduce whose result only comes out right if exactly these ranks took part in it."""
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    tensor = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [sum(ranks), len(ranks)]


# ---- it hangs ----


@pytest.mark.mpi(min_size=3)
def test_new_group_of_some_ranks(new_group) -> None:
    pair = new_group([0, 1])
    if dist.get_rank() < 2:
        sum_of_ranks(pair, [0, 1])
    else:
        assert pair == dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.mpi(min_size=3)
def test_new_group_waits_for_no_other_rank(new_group, channel) -> None:
    """The outsiders call new_group only after the members have made the group and used it."""
    rank = dist.get_rank()
    if rank > 1:
        channel.recv(source=0, tag=1)
    pair = new_group([0, 1])
    if rank < 2:
        sum_of_ranks(pair, [0, 1])
    if rank == 0:
        for outsider in range(2, channel.size):
            channel.send("go on", dest=outsider, tag=1)


@pytest.mark.mpi(min_size=2)
def test_two_groups_used_in_opposite_order(new_group) -> None:
    groups = [new_group(None), new_group(None)]
    for _ in range(20):
        tensors = [torch.full((1000,), 1.0 + index) for index in range(2)]
        order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
        works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
        for work in works:
            work.wait()
        size = dist.get_world_size()
        assert [tensor.unique().tolist() for tensor in tensors] == [[size], [2.0 * size]]


def test_two_threads_on_two_groups(new_group) -> None:
    groups = [new_group(None), new_group(None)]
    size, errors = dist.get_world_size(), []

    def work(index: int) -> None:
        try:
            for turn in range(100):
                tensor = torch.full((index * 700 + 1,), float(turn))
                dist.all_reduce(tensor, group=groups[index])
                assert tensor.unique().tolist() == [turn * size], f"group {index}, turn {turn}"
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert errors == []


@pytest.mark.mpi(min_size=2)
def test_a_send_while_a_collective_is_pending() -> None:
    """Rank 1 joins the collective only after it has the message."""
    rank = dist.get_rank()
    message, tensor = torch.full((100_000,), 7.0), torch.ones(1000)
    if rank == 1:
        received = torch.empty_like(message)
        dist.recv(received, 0)
        assert torch.equal(received, message)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        dist.send(message, 1)
    work.wait()
    assert tensor.unique().tolist() == [dist.get_world_size()]


# ---- it is silently wrong ----


@pytest.mark.skipif("MPIPLUS_TEST_HUGE" not in os.environ, reason="MPIPLUS_TEST_HUGE=1 asks for 2 GiB tensors")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "send"])
def test_more_than_2_31_elements(operation: str) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensor = torch.zeros(HUGE, dtype=torch.uint8)
    marks = [0, 1, 2**31 - 1, 2**31, HUGE - 1]
    if operation == "all_reduce" or rank == 0:
        tensor[marks] = 1
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    elif operation == "broadcast":
        dist.broadcast(tensor, 0)
    elif rank == 0 and last > 0:
        dist.send(tensor, last)
    elif rank == last and last > 0:
        dist.recv(tensor, 0)
    if operation != "send" or rank in (0, last):
        value = dist.get_world_size() if operation == "all_reduce" else 1
        assert tensor[marks].tolist() == [value] * len(marks)
        assert torch.count_nonzero(tensor).item() == len(marks)


@pytest.mark.parametrize("layout", ["strided", "transposed", "offset"])
@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_tensors_that_are_not_contiguous(name: str, layout: str, all_groups) -> None:
    failures = Failures()
    failures.run(TABLE[name], Case(all_groups["world"], shape=(6, 4), layout=layout))
    failures.report()


def test_all_gather_into_tensor_of_another_dtype_is_refused() -> None:
    output = torch.zeros(4 * dist.get_world_size(), dtype=torch.float64)
    with pytest.raises(ERRORS, match=r"(?i)dtype|float64|double"):
        dist.all_gather_into_tensor(output, torch.ones(4, dtype=torch.float32))
    assert output.unique().tolist() == [0]
    sum_of_ranks()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("any_source", [False, True])
def test_recv_leaves_the_applications_messages_alone(any_source: bool) -> None:
    from mpi4py import MPI

    rank, world = dist.get_rank(), MPI.COMM_WORLD
    if rank == 0:
        request = world.Isend(torch.full((4,), -1.0).numpy(), dest=1, tag=0)
        dist.send(torch.full((4,), 5.0), 1)
        request.Wait()
    elif rank == 1:
        ours, theirs = torch.zeros(4), torch.zeros(4)
        dist.recv(ours, None if any_source else 0)
        world.Recv(theirs.numpy(), source=0, tag=0)
        assert ours.tolist() == [5.0] * 4
        assert theirs.tolist() == [-1.0] * 4


# ---- it ends the process or the job ----


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_dropping_an_unfinished_isend(count: int, channel) -> None:
    rank = dist.get_rank()
    if rank == 0:
        tensor = torch.full((count,), 3.0)
        dist.isend(tensor, 1)
        del tensor
        gc.collect()
        torch.full((count,), -1.0)  # likely where the dropped tensor was
    channel.Barrier()
    if rank == 1:
        tensor = torch.empty(count)
        dist.recv(tensor, 0)
        assert tensor.unique().tolist() == [3.0]


def test_dropping_200_unfinished_all_reduces() -> None:
    for _ in range(200):
        dist.all_reduce(torch.ones(1000), async_op=True)
    gc.collect()
    sum_of_ranks()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [100, 300_000])
def test_a_receive_buffer_that_is_too_small(count: int, new_group) -> None:
    """The receiver is told, nothing is written past its buffer, and the group goes on."""
    group = new_group(None)
    rank, room = dist.get_rank(), torch.zeros(count)
    if rank == 0:
        dist.isend(torch.ones(count), 1, group=group).wait()
    elif rank == 1:
        with pytest.raises(RuntimeError, match=r"(?i)trunc|too small|larger|longer|bytes"):
            dist.recv(room[:10], 0, group=group)
    sum_of_ranks(group)
    assert room[10:].unique().tolist() == [0]


ROOTED = {
    "broadcast": lambda root: dist.broadcast(torch.ones(2), group_src=root),
    "reduce": lambda root: dist.reduce(torch.ones(2), group_dst=root),
    "gather": lambda root: dist.gather(torch.ones(2), group_dst=root),
    "scatter": lambda root: dist.scatter(torch.ones(2), group_src=root),
    "isend": lambda root: dist.isend(torch.ones(2), group_dst=root),
    "irecv": lambda root: dist.irecv(torch.ones(2), group_src=root),
}


@pytest.mark.parametrize("name", ROOTED)
def test_a_bad_root_is_refused(name: str) -> None:
    for root in (dist.get_world_size(), -1, 10**6):
        with pytest.raises(ValueError, match=r"(?i)rank|root"):
            ROOTED[name](root)
    sum_of_ranks()


DISAGREEING = {
    "all_gather": lambda n: dist.all_gather([torch.ones(2)] * (n + 1), torch.ones(2)),
    "all_gather, own place": lambda n: dist.all_gather([torch.ones(3)] * n, torch.ones(2)),
    "all_gather_into_tensor": lambda n: dist.all_gather_into_tensor(torch.ones(2 * n + 1), torch.ones(2)),
    "gather": lambda n: dist.gather(torch.ones(2), [torch.ones(2)] * (n + 1) if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda n: dist.reduce_scatter(torch.ones(2), [torch.ones(3)] * n),
    "reduce_scatter, too few": lambda n: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * (n + 1)),
    "reduce_scatter_tensor": lambda n: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * n + 1)),
    "all_to_all": lambda n: dist.all_to_all([torch.ones(2)] * n, [torch.ones(2)] * (n + 1)),
    "all_to_all_single": lambda n: dist.all_to_all_single(torch.ones(2 * n + 1), torch.ones(2 * n)),
    "all_to_all_single, splits": lambda n: dist.all_to_all_single(torch.ones(n), torch.ones(n), [2] * n, [1] * n),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_shapes_that_disagree_are_refused(name: str) -> None:
    if name == "gather" and dist.get_rank() != 0:
        return sum_of_ranks()  # only the root has a list that could be wrong
    with pytest.raises(ERRORS):
        DISAGREEING[name](dist.get_world_size())
    return sum_of_ranks()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_shapes_that_disagree_between_ranks_end_no_job(name: str, new_group, channel) -> None:
    """No rank can see that alone: some rank has to be told, and the job goes on in other groups."""
    group = new_group(None, timeout=timedelta(seconds=3))
    tensor = torch.ones(6 if dist.get_rank() == 0 else 5)
    try:
        if name == "all_reduce":
            dist.all_reduce(tensor, group=group)
        else:
            dist.broadcast(tensor, 0, group=group)
        told = False
    except ERRORS:
        told = True
    assert channel.allreduce(int(told)) > 0, "nobody was told"
    sum_of_ranks()


# ---- it refuses ----


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn],
    ids=str,
)
def test_types_that_it_refuses(dtype: torch.dtype, all_groups) -> None:
    failures = Failures()
    for name in ("broadcast", "all_gather", "all_reduce"):
        failures.run(TABLE[name], Case(all_groups["world"], dtype))
    failures.report()


@pytest.mark.parametrize("op_name", [name for name in REDUCE_OPS if name not in ("SUM", "PRODUCT", "MIN", "MAX")])
def test_reduce_ops_that_it_refuses(op_name: str, all_groups) -> None:
    failures = Failures()
    dtype = torch.int32 if op_name.startswith("B") else torch.float32
    failures.run(TABLE["all_reduce"], Case(all_groups["world"], dtype, op_name=op_name))
    failures.report()


@pytest.mark.parametrize(
    "name",
    [
        *("all_gather_uneven", "coalesced_all_reduce", "coalesced_all_gather_into_tensor"),
        *("coalesced_reduce_scatter_tensor", "monitored_barrier", "sparse_all_reduce"),
    ],
)
def test_operations_that_it_refuses(name: str, all_groups) -> None:
    failures = Failures()
    failures.run(TABLE[name], Case(all_groups["world"]))
    failures.report()
