"""One rank makes mistakes; each is told to it at once, and the group goes on as if nothing had happened."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, run, say

Call = Callable[[], object]
REFUSED = (ValueError, TypeError, RuntimeError)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def many(count: int, *shape: int, **options: object) -> list[torch.Tensor]:
    return [ones(*shape, **options) for _ in range(count)]


def expanded() -> torch.Tensor:
    return torch.zeros(1).expand(6)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def of_tensors(strange: Callable[[], torch.Tensor]) -> dict[str, Call]:
    """Each operation on a tensor that it cannot take, for input and for output."""
    return {
        "broadcast": lambda: dist.broadcast(strange(), 1),
        "reduce": lambda: dist.reduce(strange(), ME),
        "all_gather": lambda: dist.all_gather([strange() for _ in range(SIZE)], ones(6)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(strange(), ones(6 // SIZE)),
        "gather": lambda: dist.gather(ones(6), [strange() for _ in range(SIZE)], ME),
        "scatter": lambda: dist.scatter(strange(), many(SIZE, 6), ME),
        "reduce_scatter": lambda: dist.reduce_scatter(strange(), many(SIZE, 6)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(strange(), ones(6 * SIZE)),
        "all_to_all": lambda: dist.all_to_all([strange() for _ in range(SIZE)], many(SIZE, 6)),
        "all_to_all_single": lambda: dist.all_to_all_single(strange(), ones(6)),
        "recv": lambda: dist.recv(strange(), 1),
    }


def of_inputs(strange: Callable[[], torch.Tensor]) -> dict[str, Call]:
    """The same for what is only read."""
    return {
        "all_gather": lambda: dist.all_gather(many(SIZE, 6), strange()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(6 // SIZE), strange()),
        "all_to_all_single": lambda: dist.all_to_all_single(ones(6), strange()),
        "send": lambda: dist.send(strange(), 1),
    }


def all_reduce_of(strange: Callable[[], torch.Tensor]) -> dict[str, Call]:
    return {"all_reduce": lambda: dist.all_reduce(strange())}


def meta() -> torch.Tensor:
    return ones(6, device="meta")


def lengths() -> dict[str, Call]:
    """Shapes and lists that disagree with each other or with the number of ranks."""
    more = SIZE + 1
    return {
        "all_gather: too many outputs": lambda: dist.all_gather(many(more, 6), ones(6)),
        "all_gather: own output too short": lambda: dist.all_gather(many(SIZE, 5), ones(6)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(6 * SIZE + 1), ones(6)),
        "gather: too few outputs": lambda: dist.gather(ones(6), many(SIZE - 1, 6), ME),
        "gather: outputs too long": lambda: dist.gather(ones(6), many(SIZE, 7), ME),
        "gather: outputs on another rank": lambda: dist.gather(ones(6), many(SIZE, 6), 1),
        "gather: no outputs": lambda: dist.gather(ones(6), None, ME),
        "scatter: too many inputs": lambda: dist.scatter(ones(6), many(more, 6), ME),
        "scatter: inputs too short": lambda: dist.scatter(ones(6), many(SIZE, 5), ME),
        "scatter: no inputs": lambda: dist.scatter(ones(6), None, ME),
        "reduce_scatter: too few inputs": lambda: dist.reduce_scatter(ones(6), many(SIZE - 1, 6)),
        "reduce_scatter: own input too long": lambda: dist.reduce_scatter(ones(6), many(SIZE, 7)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(6), ones(6 * SIZE - 1)),
        "all_to_all: too many inputs": lambda: dist.all_to_all(many(SIZE, 6), many(more, 6)),
        "all_to_all: own parts differ": lambda: dist.all_to_all(many(SIZE, 6), many(SIZE, 7)),
        "all_to_all_single: not divisible": lambda: dist.all_to_all_single(ones(SIZE + 1), ones(SIZE + 1)),
        "all_to_all_single: splits do not add up": lambda: dist.all_to_all_single(ones(6), ones(6), [3, 3], [3, 4]),
        "all_to_all_single: too many splits": lambda: dist.all_to_all_single(ones(6), ones(6), [2] * 3, [2] * 3),
        "all_to_all_single: negative split": lambda: dist.all_to_all_single(ones(6), ones(6), [7, -1], [3, 3]),
        "all_reduce of two tensors": lambda: dist.group.WORLD.allreduce([ones(6), ones(5)]).wait(),
    }


def dtypes() -> dict[str, Call]:
    """dtypes that disagree, and reductions that make no sense."""
    ints = torch.int64
    return {
        "all_gather": lambda: dist.all_gather(many(SIZE, 6, dtype=ints), ones(6)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(6 * SIZE, dtype=ints), ones(6)),
        "gather": lambda: dist.gather(ones(6), many(SIZE, 6, dtype=ints), ME),
        "scatter": lambda: dist.scatter(ones(6), many(SIZE, 6, dtype=ints), ME),
        "reduce_scatter": lambda: dist.reduce_scatter(ones(6), many(SIZE, 6, dtype=ints)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(6), ones(6 * SIZE, dtype=ints)),
        "all_to_all": lambda: dist.all_to_all(many(SIZE, 6), many(SIZE, 6, dtype=ints)),
        "all_to_all_single": lambda: dist.all_to_all_single(ones(6), ones(6, dtype=ints)),
        "BAND of floats": lambda: dist.all_reduce(ones(6), dist.ReduceOp.BAND),
        "MAX of complex": lambda: dist.all_reduce(ones(6, dtype=torch.complex64), dist.ReduceOp.MAX),
        "AVG of bool": lambda: dist.reduce(ones(6, dtype=torch.bool), ME, dist.ReduceOp.AVG),
        "BXOR of floats": lambda: dist.reduce_scatter_tensor(ones(6), ones(6 * SIZE), dist.ReduceOp.BXOR),
        "not a tensor": lambda: dist.all_reduce([1.0, 2.0]),
        "not an operation": lambda: dist.all_reduce(ones(6), "sum"),
    }


def ranks_and_tags() -> dict[str, Call]:
    """Ranks that are not in the group, tags that MPI cannot carry."""
    huge = 1 << 40
    return {
        "broadcast": lambda: dist.broadcast(ones(6), SIZE),
        "broadcast, negative": lambda: dist.broadcast(ones(6), -1),
        "broadcast, rank in group": lambda: dist.broadcast(ones(6), group_src=SIZE),
        "reduce": lambda: dist.reduce(ones(6), SIZE + 7),
        "gather": lambda: dist.gather(ones(6), None, SIZE),
        "scatter": lambda: dist.scatter(ones(6), None, SIZE),
        "send": lambda: dist.send(ones(6), SIZE),
        "isend, negative": lambda: dist.isend(ones(6), -1),
        "recv": lambda: dist.recv(ones(6), SIZE),
        "irecv, rank in group": lambda: dist.irecv(ones(6), group_src=SIZE),
        "send with a negative tag": lambda: dist.isend(ones(6), 1, tag=-1),
        "recv with a negative tag": lambda: dist.irecv(ones(6), 1, tag=-1),
        "recv from anyone with a negative tag": lambda: dist.recv(ones(6), None, tag=-1),
        "send with a huge tag": lambda: dist.isend(ones(6), 1, tag=huge),
        "batch with a bad rank": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(6), SIZE)]),
    }


def mistakes() -> dict[str, dict[str, Call]]:
    """All of them, by kind."""
    csr = ones(3, 3).to_sparse_csr
    return {
        "meta outputs": of_tensors(meta),
        "meta inputs": of_inputs(meta),
        "meta in place": all_reduce_of(meta),
        "sparse outputs": of_tensors(sparse),
        "sparse inputs": of_inputs(sparse),
        "CSR in place": all_reduce_of(csr),
        "outputs that share memory": of_tensors(expanded),
        "sharing memory in place": all_reduce_of(expanded),
        "lengths": lengths(),
        "dtypes": dtypes(),
        "ranks and tags": ranks_and_tags(),
    }


def one_rank_errs() -> None:
    """Rank 0 makes them all; all ranks work together after each kind, and at the end nothing is left over."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=30))
    closed = dist.new_group()
    dist.destroy_process_group(closed)
    calls = mistakes()
    # not a root that waits, but one that reads: an expanded tensor is as good as any other there
    del calls["outputs that share memory"]["broadcast"]
    wrong = []
    for kind, of_kind in calls.items():
        if ME == 0:
            wrong += [f"{kind}: {name}: {what}" for name, call in of_kind.items() if (what := problem_of(call))]
        check_works()
    if ME == 0:
        for name, call in {
            "all_reduce": lambda: dist.all_reduce(ones(6), group=closed),
            "send": lambda: closed.send([ones(6)], 1, 0),
            "barrier": closed.barrier,
        }.items():
            wrong += [f"closed group: {name}: {what}" for what in [problem_of(call)] if what]
        for line in wrong:
            say(line)
    check_works()
    dist.destroy_process_group()
    assert not wrong, f"{len(wrong)} mistakes were not refused"


def problem_of(call: Call) -> str | None:
    """None where the mistake was refused as it should; else what happened."""
    try:
        call()
    except REFUSED as error:
        text = str(error)
        if "timed out" in text or len(text) < 15:
            return f"{type(error).__name__}: {text}"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def coalescing() -> None:
    """A mistake inside a coalescing block leaves no trace: later operations go out, and let go of their tensors."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=30))
    if ME == 0:
        try:
            with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
                dist.all_reduce(ones(3, device="meta"))
        except REFUSED as error:
            say(f"refused: {error}")
    check_works()
    tensor = ones(5)
    dist.all_reduce(tensor)
    assert tensor[0] == SIZE
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    check_works()
    assert alive() is None, "the group still holds a tensor of an operation that is over"
    dist.destroy_process_group()


run(globals())
