"""Windows: what one rank puts is in another's tensor when its signal is, mapped or by messages."""

from __future__ import annotations

import gc

import inside
import psutil
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, movement_data
from expected import as_bytes
from groups import only_up_to
from patience import wait_until
from torch.distributed import DistBackendError
from windows import HAS_WINDOWS, KINDS, SHARES, WHY_NOT, meet, memory, options

pytestmark = [only_up_to(3), pytest.mark.skipif(not HAS_WINDOWS, reason=WHY_NOT)]

NUMEL = 7
LARGE = 1 << 21  # 8 MiB: more than an MPI sends before the other side asks for it


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("family", ["world", "reversed", "even_odd"])
def test_every_dtype(kind: str, asynchronous: bool, family: str, all_groups) -> None:
    """Each rank writes to its own place in everybody's tensor, its own too; ranks are ranks of the group."""
    group = all_groups[family].process_group
    rank, size = group.rank(), group.size()
    wrong = []
    for dtype in DTYPES:
        target = memory(group, kind, size * NUMEL, dtype)
        window = group.new_window(target)
        for other in range(size):
            window.put(movement_data(dtype, (NUMEL,), rank, other), other, rank * NUMEL, asynchronous).wait()
        meet(window, group)
        for other in range(size):
            found = target[other * NUMEL : (other + 1) * NUMEL]
            if not torch.equal(as_bytes(found), as_bytes(movement_data(dtype, (NUMEL,), other, rank))):
                wrong.append((dtype, other))
        window.tensor_deregister()
    assert wrong == []


@pytest.mark.mpi(min_size=2)
def test_offsets_layouts_and_nothing_at_all(kind: str, group) -> None:
    rank, size = group.rank(), group.size()
    target = memory(group, kind, 20)[2:]  # a window need not begin where its memory does
    window = group.new_window(target)
    right = (rank + 1) % size
    strided = torch.arange(8.0).view(2, 4)[:, 1:3]
    window.put(torch.full((), 9.0), right, 0, False)
    window.put(strided, right, 3, False)
    window.put(strided.t(), right, 14, False)
    window.put(torch.empty(0), right, 18, False)
    window.put(torch.empty(0), right, 0, True).wait()
    meet(window, group)
    expected = [9, 0, 0, 1, 2, 5, 6, *[0] * 7, 1, 5, 2, 6]
    assert target.tolist() == expected
    window.tensor_deregister()


def test_ranks_with_different_tensors(kind: str, group) -> None:
    """Sizes, shapes and dtypes are each rank's own; rank 0 has nothing."""
    rank, size = group.rank(), group.size()
    dtypes = [torch.float64, torch.int16, torch.uint8]
    target = memory(group, kind, rank * 6, dtypes[rank]).view(rank, 3, 2)
    window = group.new_window(target)
    for other in range(1, size):
        if other != rank:
            window.put(torch.full((2,), rank + 1, dtype=dtypes[other]), other, 2 * rank, False)
    with pytest.raises(ValueError, match=r"elements 0 to 1 are not in the tensor of rank 0, which has 0"):
        window.put(torch.zeros(1, dtype=dtypes[0]), 0, 0, False)
    meet(window, group)
    found = target.view(-1).tolist()
    expected = [0] * (rank * 6)
    for other in range(size):
        if other != rank and rank > 0:
            expected[2 * other : 2 * other + 2] = [other + 1] * 2
    assert found == expected
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_a_signal_comes_after_what_was_put(kind: str, group) -> None:
    """Also when nothing was waited for, and long and short, cut up and whole, follow each other."""
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    target = memory(group, kind, 50_000)
    window = group.new_window(target)
    wrong = []
    with inside.chunk_limit(64 * 1024):
        for turn in range(60):
            value = float(turn * size + rank)
            works = [window.put(torch.full((50_000,), value), right, 0, True) for _ in range(turn % 3)]
            works += [window.put(torch.full((3,), -value), right, 7, True), window.signal(right, True)]
            window.wait_signal(left, turn % 2 == 1).wait()
            if turn % 3 and target[[0, -1]].tolist() != [turn * size + left] * 2:
                wrong.append((turn, target[[0, -1]].tolist()))
            if target[7:10].tolist() != [-float(turn * size + left)] * 3:
                wrong.append((turn, target[7:10].tolist()))
            window.signal(left, True)  # has read
            window.wait_signal(right, False)
            for work in works:
                work.wait()
    assert wrong == []
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_who_is_written_to_need_not_call_anything(kind: str, group) -> None:
    if group.rank() == 0:
        window = group.new_window(memory(group, kind, LARGE))
        window.put(torch.ones(LARGE), 1, 0, False)
    elif group.rank() == 1:
        target = memory(group, kind, LARGE)
        window = group.new_window(target)
        wait_until(lambda: target[-1] == 1, 20)
    else:
        window = group.new_window(memory(group, kind, 1))
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_deregistering_waits_for_what_is_on_its_way(kind: str, group) -> None:
    rank, size = group.rank(), group.size()
    target = memory(group, kind, LARGE)
    window = group.new_window(target)
    works = [window.put(torch.full((LARGE // size,), rank + 1.0), 0, rank * (LARGE // size), True)]
    window.tensor_deregister()
    if rank == 0:
        for other in range(size):
            assert target[other * (LARGE // size) : (other + 1) * (LARGE // size)].unique().tolist() == [other + 1]
    for work in works:
        work.wait()


# ---- signals ----


@pytest.mark.mpi(min_size=2)
def test_signals_are_counted(kind: str, group, channel) -> None:
    """One for each wait, those that came earlier too; one too few is a timeout that takes none."""
    rank = group.rank()
    window = group.new_window(memory(group, kind, 1))
    if rank == 0:
        for _ in range(3):
            window.signal(1, False)
    channel.Barrier()
    if rank == 1:
        for _ in range(3):
            window.wait_signal(0, False)
        with pytest.raises(DistBackendError) as caught:
            window.wait_signal(0, False, options("WaitSignalOptions", 0.3))
        message = str(caught.value)
        for part in ("wait_signal from rank 0", group.label, "timed out on rank 1", "0.3 s"):
            assert part in message
        with pytest.raises(DistBackendError, match="timed out"):
            window.wait_signal(1, True, options("WaitSignalOptions", 0.3)).wait()
    channel.Barrier()
    if rank == 0:
        window.signal(1, False)
    elif rank == 1:
        window.wait_signal(0, False)
    window.tensor_deregister()


# ---- groups and windows ----


def test_a_window_may_be_used_again(kind: str, group) -> None:
    window = group.new_window()
    for operation, arguments in (
        ("put", (torch.ones(1), 0, 0, False)),
        ("signal", (0, False)),
        ("wait_signal", (0, False)),
        ("map_remote_tensor", (0,)),
        ("get_attr", (0,)),
        ("tensor_deregister", ()),
    ):
        with pytest.raises(RuntimeError, match=f"{operation}: the window has no tensor; call tensor_register"):
            getattr(window, operation)(*arguments)
    for turn in range(3):
        target = memory(group, kind, 4)
        window.tensor_register(target)
        with pytest.raises(RuntimeError, match="the window has a tensor already"):
            window.tensor_register(target)
        window.put(torch.full((4,), turn + 1.0), (group.rank() + 1) % group.size(), 0, False)
        meet(window, group)
        assert target.tolist() == [turn + 1.0] * 4
        window.tensor_deregister()


def test_nothing_is_left_behind(kind: str, group) -> None:
    opened = []
    for turn in range(40):
        window = group.new_window(memory(group, kind, 4))
        meet(window, group)
        window.tensor_deregister()
        if turn in (4, 39):
            gc.collect()
            opened.append(psutil.Process().num_fds())
    assert opened[1] <= opened[0] + 3


def test_torchs_own_names(group) -> None:
    assert dist._supports_window() is True
    target = torch.zeros(3)
    window = dist._new_window(target)
    assert isinstance(window, torch._C._distributed_c10d.Window)
    window.put(torch.ones(3), group.rank(), 0, False)
    assert target.tolist() == [1.0] * 3
    window.tensor_deregister()


# ---- mapping ----


def test_a_mapped_tensor_is_the_other_ranks_own(group) -> None:
    """To read and to write, in its own shape."""
    rank, size = group.rank(), group.size()
    right = (rank + 1) % size
    target = memory(group, "mapped", 12).view(3, 4)[1:]
    target.fill_(rank)
    window = group.new_window(target)
    kinds = torch._C._distributed_c10d.WindowAccessType
    if not SHARES and size > 1:
        assert window.get_attr(right).access_type == kinds.SEPARATE
        pytest.skip("MPIPLUS_COLLECTIVES=mpi-only: no memory is shared")
    assert window.get_attr(right).access_type == kinds.UNIFIED
    view = window.map_remote_tensor(right)
    assert view.tolist() == [[right] * 4] * 2
    dist.barrier()
    view[1, 2] = 100 + rank
    meet(window, group)
    assert target[1].tolist() == [rank, rank, 100 + (rank - 1) % size, rank]
    window.tensor_deregister()
    assert view.shape == (2, 4)  # still there, though nobody else's any more


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("why", ["an ordinary tensor", "MPIPLUS_COLLECTIVES=mpi-only"])
def test_what_cannot_be_mapped(why: str, group, monkeypatch) -> None:
    if why == "MPIPLUS_COLLECTIVES=mpi-only":
        monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only")
    rank, size = group.rank(), group.size()
    right = (rank + 1) % size
    target = memory(group, "messages" if why == "an ordinary tensor" else "mapped", 4)
    window = group.new_window(target)
    kinds = torch._C._distributed_c10d.WindowAccessType
    assert window.get_attr(right).access_type == kinds.SEPARATE
    assert window.get_attr(rank).access_type == kinds.UNIFIED
    assert window.map_remote_tensor(rank).data_ptr() == target.data_ptr()
    with pytest.raises(ValueError, match=rf"the tensor of rank {right} cannot be mapped here.*allocate_tensor"):
        window.map_remote_tensor(right)
    window.put(torch.ones(4), right, 0, False)
    meet(window, group)
    assert target.tolist() == [1.0] * 4
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_some_tensors_can_be_mapped_and_some_cannot(group) -> None:
    rank, size = group.rank(), group.size()
    target = memory(group, KINDS[rank % 2], size)
    window = group.new_window(target)
    for turn in range(10):
        for other in range(size):
            window.put(torch.full((1,), turn + 1.0), other, rank, True)
        meet(window, group)
        assert target.tolist() == [turn + 1.0] * size
        dist.barrier()
    window.tensor_deregister()


@pytest.mark.parametrize("owning", [True, False])
def test_memory_is_kept_while_others_may_write_to_it(kind: str, owning: bool, group) -> None:
    window = group.new_window()
    window.tensor_register(memory(group, kind, 1000), owning)
    gc.collect()
    others = [memory(group, kind, 1000) for _ in range(10)]  # would lie there
    window.put(torch.ones(1000), (group.rank() + 1) % group.size(), 0, False)
    meet(window, group)
    assert window.map_remote_tensor(group.rank()).unique().tolist() == [1.0]
    assert sum(other.sum().item() for other in others) == 0
    window.tensor_deregister()
