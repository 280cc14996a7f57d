"""Ranks that call different things all get an error, whatever it is, and go on together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import collectives
import inside
import pytest
import torch
import torch.distributed as dist
from collectives import COLLECTIVES
from fake_cuda import DeviceTensor, Driver, on_device
from groups import only_up_to
from placements import PLACEMENTS, Placed
from sampling import count, dice

import torchmpi_plugin
from torchmpi_plugin.diagnosis import comparison

pytestmark = pytest.mark.mpi(min_size=2)

DTYPES = (torch.float32, torch.int32, torch.float64, torch.uint8)
OPS = ("SUM", "MAX", "AVG", "PRODUCT", "PREMUL_SUM")
COUNTS = (1, 2, 3, 255, 256, 257, 1024, 2048, 5000, 20_000)
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scan", "exscan")
MARK = 77


@dataclass(frozen=True)
class Call:
    """One rank's call. `counts`: elements of each rank's block; `matrix[a][b]`: those that a sends to b."""

    kind: str
    dtype: torch.dtype
    op: str
    root: int
    counts: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...] = field(repr=False)
    on_device: bool = False  # and MPI gets its address

    def lengths(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of an exchange: elements to and from each rank."""
        size = len(self.counts)
        zero = (0,) * size
        if self.kind == "gather":
            sent = tuple(self.counts[0] * (r == self.root) for r in range(size))
            return sent, (self.counts[0],) * size if rank == self.root else zero
        if self.kind == "scatter":
            received = tuple(self.counts[0] * (r == self.root) for r in range(size))
            return (self.counts[0],) * size if rank == self.root else zero, received
        return self.matrix[rank], tuple(row[rank] for row in self.matrix)


PREFIXES = ("scan", "exscan")
EXCHANGES = ("gather", "scatter", "all_to_all", "all_to_all_single")
KINDS = (*("barrier", "broadcast", "all_gather", "all_gather_into_tensor"), *REDUCING, *EXCHANGES)


def agree(calls: list[Call]) -> bool:
    """Whether these calls of all ranks go together: what has to be equal, is."""
    if all(call.kind in EXCHANGES for call in calls):
        lengths = [call.lengths(rank) for rank, call in enumerate(calls)]
        size = [call.dtype.itemsize for call in calls]
        pairs = [(a, b) for a in range(len(calls)) for b in range(len(calls)) if a != b]
        return all(lengths[a][0][b] * size[a] == lengths[b][1][a] * size[b] for a, b in pairs)
    return len({essence(call) for call in calls}) == 1


def essence(call: Call) -> tuple:
    kind, each = call.kind, call.dtype.itemsize
    if kind in EXCHANGES:
        return ("exchange",)
    if call.on_device and moved_by_mpi(call):
        return "on a device", kind == "all_gather", *essence(replace(call, on_device=False))
    how = (call.dtype, call.op) if kind in REDUCING else ()
    root = call.root if kind in ("broadcast", "reduce") else None
    if kind == "barrier":
        return (kind,)
    if kind in ("all_gather", "reduce_scatter"):
        return kind, *how, *(count * each for count in call.counts)
    if kind.endswith("_tensor"):
        kind = kind.removesuffix("_into_tensor").removesuffix("_tensor")
        return kind, *how, *(call.counts[0] * each for _ in call.counts)
    return kind, *how, root, call.counts[0] * each


def moved_by_mpi(call: Call) -> bool:
    """Of CUDA tensors; others are staged."""
    if call.op == "PREMUL_SUM" and call.kind in REDUCING:
        return False  # each rank has its own factor, which no other knows
    return call.kind != "barrier" and call.kind not in PREFIXES


def reduction(op: str) -> Any:
    return dist._make_nccl_premul_sum(2.0) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def begin(call: Call, group: dist.ProcessGroup, rank: int, is_async: bool) -> tuple[Callable[[], Any], list]:
    """What makes this rank's call, and the tensors in which its result comes."""
    if call.kind == "barrier":
        return lambda: dist.barrier(group, async_op=is_async), []
    row = COLLECTIVES["all_to_all_single_splits" if call.kind == "all_to_all_single" else call.kind]

    def block(of: int, slot: int) -> torch.Tensor:
        lengths = {"all_gather": call.counts[of], "reduce_scatter": call.counts[slot]}
        exchanged = call.matrix[of][slot] if call.kind.startswith("all_to_all") else call.counts[0]
        return torch.ones(lengths.get(call.kind, exchanged), dtype=call.dtype)

    def place(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [on_device(DeviceTensor.driver, tensor) for tensor in tensors] if call.on_device else tensors

    sees = collectives.Everyone(block, rank, len(call.counts), call.root, op_name="")
    marked = [torch.full_like(tensor, MARK) for tensor in ([block(0, 0)] if row.in_place else row.all_taken(sees))]
    taken = place(marked)
    given = taken if row.in_place else place(row.all_given(sees))
    op = reduction("MIN" if call.op == "AVG" and call.kind in PREFIXES else call.op)
    return partial(row.call, collectives.Call(sees, given, taken, op, group, is_async)), taken


def random_call(dice: random.Random, size: int) -> Call:
    counts = tuple(dice.choice(COUNTS) for _ in range(size))
    matrix = tuple(tuple(dice.choice((0, 1, 5, 3000)) for _ in range(size)) for _ in range(size))
    return Call(dice.choice(KINDS), dice.choice(DTYPES), dice.choice(OPS), dice.randrange(size), counts, matrix)


def changed(call: Call, dice: random.Random) -> Call:
    """Another call, or one that differs in a single thing."""
    other = random_call(dice, len(call.counts))
    names = ("kind", "dtype", "op", "root", "counts", "matrix", "swapped", "one count", "place", "everything")
    name = dice.choice(names)
    if name == "everything":
        return replace(other, on_device=call.on_device)
    if name == "place":
        return replace(call, on_device=False)
    if name == "swapped":
        return replace(call, counts=call.counts[::-1])
    if name == "one count":
        at = dice.randrange(len(call.counts))
        counts = (*call.counts[:at], call.counts[at] + dice.choice((1, 1024, 2048)), *call.counts[at + 1 :])
        return replace(call, counts=counts)
    return replace(call, **{name: getattr(other, name)})


def problem_of(call: Call, calls: list[Call], group: Any, rank: int, is_async: bool) -> str | None:
    """Make this rank's call; what is wrong about how it went."""
    start, results = begin(call, group, rank, is_async)
    error = None
    try:
        work = start()
        if is_async:
            work.wait()
    except dist.DistBackendError as caught:
        error = str(caught)
    if agree(calls):
        return error and f"an error though all agree: {error}"
    if error is None:
        return "no error"
    if "ranks disagree" not in error or "can be used again" not in error:
        return f"another error: {error}"
    if call.on_device:
        DeviceTensor.driver.drain()
    return None if all((tensor == MARK).all() for tensor in results) else "a result was written"


#: Random calls of all ranks; at night ten times as many.
CALLS = count(600, 40)


@pytest.mark.parametrize("placement", [*PLACEMENTS, "MPI, by choice"])
def test_every_difference_is_an_error_on_every_rank(placement: str, new_group, placed: Placed, channel) -> None:
    """Whoever moves the data."""
    if placement in PLACEMENTS:
        group = placed(placement).process_group
    else:
        group = new_group(None, pg_options=torchmpi_plugin.Options(collectives="mpi"))
    inside.set_timeout(group, timedelta(seconds=20))
    try_random_calls(group, channel, f"disagreements, {placement}", on_device=False)


@only_up_to(3)
def test_every_difference_where_mpi_gets_cuda_tensors(new_group, channel, driver: Driver, monkeypatch) -> None:
    group = new_group(None, timeout=timedelta(seconds=20))
    inside.let_mpi_reach_devices([group])
    inside.stage_no_reductions(monkeypatch)
    with driver.on_stream(kernel_us=50):
        try_random_calls(group, channel, "disagreements on devices", on_device=True)


def try_random_calls(group: dist.ProcessGroup, channel: Any, name: str, on_device: bool) -> None:
    size, rank, random_numbers = dist.get_world_size(), dist.get_rank(), dice(name)
    differences = 0
    for number in range(CALLS):
        agreed = replace(random_call(random_numbers, size), on_device=on_device)
        calls = [changed(agreed, random_numbers) if random_numbers.random() < 0.4 else agreed for _ in range(size)]
        is_async = [random_numbers.random() < 0.5 for _ in range(size)]
        differences += not agree(calls)
        problem = problem_of(calls[rank], calls, group, rank, is_async[rank])
        total = torch.tensor([rank + 1.0])
        if not problem:
            dist.all_reduce(total, group=group)
            if total.item() != size * (size + 1) / 2:
                problem = f"a wrong sum afterwards: {total.item()}"
        problems = channel.allgather(problem)
        assert not any(problems), f"call {number}: {list(zip(calls, is_async, problems, strict=True))}"
    assert differences > CALLS // 10  # of two ranks a third differ, or more


def same_bytes(group: dist.ProcessGroup, odd: bool) -> dict[str, Callable[[], Any]]:
    """Calls that only TORCH_DISTRIBUTED_DEBUG=DETAIL tells apart; by what it says."""
    how = {"group": group, "async_op": True}
    return {
        r"broadcast of \(4,\) float32 with root 0; rank \d calls broadcast of \(4,\) int32 with root 0": lambda: (
            dist.broadcast(torch.ones(4, dtype=torch.int32 if odd else torch.float32), group_src=0, **how)
        ),
        r"all_to_all of \(0,\) float32.*; rank \d calls all_to_all_single of \(0,\) float32": lambda: (
            dist.all_to_all_single(torch.ones(0), torch.ones(0), **how)
            if odd
            else dist.all_to_all(*([torch.ones(0) for _ in range(group.size())] for _ in range(2)), **how)
        ),
    }


def of_other_bytes(group: dist.ProcessGroup, odd: bool) -> dict[str, Callable[[], Any]]:
    """Calls that never go together; by what is said in detail."""
    size, how, one = group.size(), {"group": group, "async_op": True}, torch.ones(1)
    return {
        r"\(SUM\).* \(MAX\)": lambda: dist.all_reduce(one, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, **how),
        "root 0;.* root 1": lambda: dist.broadcast(one, group_src=int(odd), **how),
        r"reduce_scatter \(SUM\) of \(1,\) float32;.* reduce_scatter_tensor \(SUM\)": lambda: (
            dist.reduce_scatter_tensor(one, torch.ones(size), **how)
            if odd
            else dist.reduce_scatter(one, [torch.ones(1)] * size, **how)
        ),
        r"rank \d sends 8 bytes to rank 0, which expects 4": lambda: dist.gather(
            torch.ones(2 if odd else 1), None if group.rank() else blocks([1] * size, torch.float32), group_dst=0, **how
        ),
    }


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_in_detail(placement: str, placed: Placed) -> None:
    """Wherever the ranks are and whoever moves the data; without DETAIL bytes are bytes."""
    group = placed(placement).process_group
    mismatches, odd = [], group.rank() == group.size() - 1
    alike = same_bytes(group, odd)
    for pattern, call in (alike | of_other_bytes(group, odd)).items():
        inside.calls(group).compares = True
        match = f"detected mismatch between collectives on ranks: .*{pattern}.*can be used again"
        with pytest.raises(dist.DistBackendError, match=match):
            call().wait()
        mismatches.append(group.checkin.mismatch)
        inside.calls(group).compares = False
        if pattern in alike:
            call().wait()
    dist.barrier(group)
    left = [len(group.checkin.missing(mismatch)) < group.size() for mismatch in mismatches]
    assert left == [False] * (len(mismatches) - 1) + [True], "the store keeps the last one only"


def test_in_detail_where_a_rank_says_nothing(new_group, monkeypatch) -> None:
    """The words are those of any group then."""
    monkeypatch.setattr(comparison, "TELLING_SECONDS", 0.2)
    group = new_group(None)
    inside.calls(group).compares = True
    if group.rank() == 0:
        monkeypatch.setattr(group.checkin, "gather", lambda *_: [])
    with pytest.raises(dist.DistBackendError, match=r"ranks disagree: .*, calls all_reduce \(SUM\).*can be used again"):
        dist.all_reduce(torch.ones(4 if group.rank() else 5), group=group)
    dist.barrier(group)


def blocks(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((count,), MARK, dtype=dtype) for count in counts]


def group_spans_hosts(group) -> bool:
    return group.communicator.node_count > 1


@pytest.mark.mpi(min_size=3)
def test_lists_that_differ_in_a_third_ranks_block(new_group) -> None:
    group, rank, size = new_group(None), dist.get_rank(), dist.get_world_size()
    counts = [7] * (size - 1) + [8 if rank == 1 else 9]
    match = "rank 1 .* has other lengths in its list"
    if group_spans_hosts(group):  # of the other nodes only two calls are known that differ
        match = "has other lengths in its list|for which the list of this rank has"
    elif rank == 1:
        match = f"rank {size - 1} .* its own of 36, for which the list of this rank has 32"
    with pytest.raises(dist.DistBackendError, match=match):
        dist.all_gather(blocks(counts, torch.float32), torch.ones(counts[rank]), group=group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("count", [3, 5000])
def test_each_rank_has_its_own_factor(dtype: torch.dtype, count: int) -> None:
    """As torch says of PREMUL_SUM: "multiplies inputs by a given scalar locally before reduction"."""
    rank, size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(2.0 + rank)
    wanted = sum(2.0 + r for r in range(size))
    tensor = torch.ones(count, dtype=dtype)
    dist.all_reduce(tensor, op=op)
    assert (tensor == wanted).all()
    part = torch.zeros(count, dtype=dtype)
    dist.reduce_scatter_tensor(part, torch.ones(count * size, dtype=dtype), op=op)
    assert (part == wanted).all()


@pytest.mark.parametrize("count", [3, 1 << 18])
def test_an_exchange_that_one_rank_does_not_make(count: int, new_group) -> None:
    """Between nodes its blocks have been sent when that is known; none of them stays, or is taken for another's."""
    group, rank, size = new_group(None), dist.get_rank(), dist.get_world_size()
    match = "gather, scatter or all_to_all" if rank == 0 else "all_reduce"
    for _ in range(3):
        mine, outs = torch.full((count * size,), float(rank)), torch.zeros(count * size)
        with pytest.raises(dist.DistBackendError, match=match):
            if rank == 0:
                dist.all_reduce(mine, group=group)
            else:
                dist.all_to_all_single(outs, mine - 7, group=group)
        assert not outs.any()
        dist.all_to_all_single(outs, mine, group=group)
        assert outs.view(size, count).eq(torch.arange(float(size))[:, None]).all()
    dist.barrier(group=group)
    assert not group.communicator.comm.Iprobe()


@pytest.mark.parametrize("what", ["dtype", "shape", "dimensions", "reduction"])
def test_sparse_tensors(what: str, new_group) -> None:
    """Their entries are only moved by MPI: the ranks compare what they are to do with them."""
    group, is_first, same = new_group(None), dist.get_rank() == 0, torch.eye(3).to_sparse()
    others = {"dtype": torch.eye(3, dtype=torch.int32).to_sparse(), "shape": torch.eye(4).to_sparse()}
    others["dimensions"] = torch.eye(3).to_sparse(1)
    op = dist.ReduceOp.AVG if what == "reduction" and not is_first else dist.ReduceOp.SUM
    with pytest.raises(dist.DistBackendError, match=r"another dtype, shape or .*rank 0 \(float32, \[3, 3\]\)"):
        dist.all_reduce(same.clone() if is_first else others.get(what, same.clone()), op, group)
    dist.all_reduce(same, group=group)
    assert same.to_dense().equal(dist.get_world_size() * torch.eye(3))
