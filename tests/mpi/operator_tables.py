"""torch's operators as tables: those of ``torch.ops.c10d``, and the functional ones, each on tensors of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from groups import on_gloo
from torch.utils._python_dispatch import TorchDispatchMode

from torchmpi_plugin import torch_operators

Results = list[torch.Tensor]
needs_operators = pytest.mark.skipif(
    not torch_operators.operators_tell_the_reduction(), reason="this torch does not tell operators' reductions"
)
#: From torch 2.15 on it goes to a backend in C++, and no kernel of ours stands in front.
LEFT_TO_THE_BACKEND = {"c10d::monitored_barrier_"} if torch.__version__ >= "2.15" else set()
#: Of torch 2.14 and later; gloo has none, and before 2.12 no all_to_all of lists.
NOT_OF_GLOO = {"c10d::gather_into_tensor_", *(["c10d::alltoall_"] if torch.__version__ < "2.12" else [])}


def ramp(length: int = 4, more: float = 0.0) -> torch.Tensor:
    return torch.arange(float(length)) + 10 * dist.get_rank() + more


def ramps(length: int = 4) -> Results:
    return [ramp(length, more) for more in range(dist.get_world_size())]


class Keeping(TorchDispatchMode):
    """Keeps an argument of an operator: C++ alone makes a boxed ReduceOp, before torch 2.15."""

    op: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = args[2] if func is torch.ops.c10d.allreduce_.default else self.op
        return func(*args, **(kwargs or {}))


def boxed_sum(gloo: Any) -> Any:
    with Keeping() as mode:
        gloo.allreduce([torch.ones(1)]).wait()
    return mode.op


def results_on_gloo(channel: Any, calls: Callable[[Any], dict[str, Callable[[], Results]]]) -> dict[str, Results]:
    """Of each operator, on new tensors: gloo's reduce leaves others than ours behind."""
    return on_gloo(
        channel, lambda gloo: {name: calls(gloo)[name]() for name in calls(gloo) if f"c10d::{name}" not in NOT_OF_GLOO}
    )


def finished(returned: Any) -> None:
    dist.Work.unbox(returned[-1] if isinstance(returned, tuple) else returned).wait()


def operators(group: Any, op: Any) -> dict[str, Callable[[], Results]]:
    """Of ``torch.ops.c10d``, each on tensors of its own."""
    c10d, boxed, size, rank = torch.ops.c10d, group.boxed(), dist.get_world_size(), dist.get_rank()
    root, one, many, flat, piece = rank == 0, [ramp()], ramps(), ramp(4 * size), [torch.zeros(4)]
    lists, pair = [[torch.zeros(4), torch.zeros(2)] for _ in range(size)], [ramp(), ramp(2)]
    flats = torch.zeros(4 * size)
    both, wide = [torch.zeros(4 * size), torch.zeros(2 * size)], [ramp(4 * size), ramp(2 * size)]
    after, before = (rank + 1) % size, (rank - 1) % size

    def of(call: Callable[[], Any], results: Results) -> Callable[[], Results]:
        return lambda: (finished(call()), results)[1]

    def passed_on(anyone: bool) -> Results:
        sent = c10d.send([ramp()], boxed, after, 3)
        finished(c10d.recv_any_source_(piece, boxed, 3) if anyone else c10d.recv_(piece, boxed, before, 3))
        finished(sent)
        return piece

    found = {
        "allreduce_": of(lambda: c10d.allreduce_(one, boxed, op, None), one),
        "allreduce_coalesced_": of(lambda: c10d.allreduce_coalesced_(pair, boxed, op), pair),
        "broadcast_": of(lambda: c10d.broadcast_(one, boxed, 1, 0), one),
        "broadcast_ with a timeout": of(lambda: c10d.broadcast_(one, boxed, 1, 0, False, 30000), one),
        "allgather_": of(lambda: c10d.allgather_([many], one, boxed), many),
        "_allgather_base_": of(lambda: c10d._allgather_base_(flats, one[0], boxed), [flats]),
        "allgather_coalesced_": of(
            lambda: c10d.allgather_coalesced_(lists, pair, boxed), [tensor for each in lists for tensor in each]
        ),
        "allgather_into_tensor_coalesced_": of(lambda: c10d.allgather_into_tensor_coalesced_(both, pair, boxed), both),
        "reduce_scatter_": of(lambda: c10d.reduce_scatter_(piece, [many], boxed, op), piece),
        "_reduce_scatter_base_": of(lambda: c10d._reduce_scatter_base_(piece[0], flat, boxed, op), piece),
        "reduce_scatter_tensor_coalesced_": of(
            lambda: c10d.reduce_scatter_tensor_coalesced_(pair, wide, boxed, op), pair
        ),
        "reduce_": of(lambda: c10d.reduce_(one, boxed, op, 0, 0), one if root else []),
        "gather_": of(lambda: c10d.gather_([many] if root else [], one, boxed, 0), many if root else []),
        "scatter_": of(lambda: c10d.scatter_(piece, [many] if root else [], boxed, 0), piece),
        "alltoall_": of(lambda: c10d.alltoall_(lists_of(lists), many, boxed), lists_of(lists)),
        "alltoall_base_": of(lambda: c10d.alltoall_base_(flats, flat, boxed, [], []), [flats]),
        "barrier": of(lambda: c10d.barrier(torch.zeros(1), boxed, []), []),
        "send and recv_": lambda: passed_on(False),
        "send and recv_any_source_": lambda: passed_on(True),
    }
    if not LEFT_TO_THE_BACKEND:
        found["monitored_barrier_"] = lambda: (c10d.monitored_barrier_(torch.zeros(1), boxed, [], 30000, True), [])[1]
    return found


def lists_of(lists: list[Results]) -> Results:
    return [each[0] for each in lists]


class Place(NamedTuple):
    """A rank of a group, as functional operators are told of it."""

    name: str
    size: int
    rank: int

    @property
    def after(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def before(self) -> int:
        return (self.rank - 1) % self.size

    @property
    def even(self) -> list[int]:
        return [2] * self.size


def place_of(group: Any) -> Place:
    return Place(group.group_name, dist.get_world_size(), dist.get_rank())


def one(place: Place) -> Results:
    return [ramp()]


def pair(place: Place) -> Results:
    return [ramp(), ramp(2)]


def wide(place: Place) -> Results:
    return [ramp(2 * place.size)]


def wide_pair(place: Place) -> Results:
    return [ramp(4 * place.size), ramp(2 * place.size)]


def sent_and_received(place: Place) -> Results:
    return [ramp(), torch.zeros(4)]


def messages_at_once(p: Place, names: list[str], peers: list[int], tensors: Results) -> Results:
    return torch.ops._c10d_functional.batch_p2p_ops(names, peers, [5, 5], tensors, p.name)  # type: ignore[no-any-return]


_plain, _autograd = torch.ops._c10d_functional, torch.ops._c10d_functional_autograd
#: Of ``torch.ops._c10d_functional`` and ``_autograd``: the tensors that a program is given, and what it calls.
FUNCTIONALS: dict[str, tuple[Callable[[Place], Results], Callable[..., Any]]] = {
    "all_reduce": (one, lambda p, t: _plain.all_reduce(t, "sum", p.name)),
    "all_reduce_": (one, lambda p, t: _plain.all_reduce_(t, "max", p.name)),
    "all_reduce_coalesced": (pair, lambda p, *t: _plain.all_reduce_coalesced(list(t), "sum", p.name)),
    "all_reduce_coalesced_": (pair, lambda p, *t: _plain.all_reduce_coalesced_(list(t), "sum", p.name)),
    "all_gather_into_tensor": (one, lambda p, t: _plain.all_gather_into_tensor(t, p.size, p.name)),
    "all_gather_into_tensor_out": (
        lambda p: [ramp(), torch.zeros(4 * p.size)],
        lambda p, t, out: _plain.all_gather_into_tensor_out(t, p.size, p.name, out=out),
    ),
    "all_gather_into_tensor_coalesced": (
        pair,
        lambda p, *t: _plain.all_gather_into_tensor_coalesced(list(t), p.size, p.name),
    ),
    "reduce_scatter_tensor": (wide, lambda p, t: _plain.reduce_scatter_tensor(t, "sum", p.size, p.name)),
    "reduce_scatter_tensor_out": (
        lambda p: [ramp(2 * p.size), torch.zeros(2)],
        lambda p, t, out: _plain.reduce_scatter_tensor_out(t, "sum", p.size, p.name, out=out),
    ),
    "reduce_scatter_tensor_coalesced": (
        wide_pair,
        lambda p, *t: _plain.reduce_scatter_tensor_coalesced(list(t), "sum", p.size, p.name),
    ),
    "all_to_all_single": (wide, lambda p, t: _plain.all_to_all_single(t, p.even, p.even, p.name)),
    "broadcast": (one, lambda p, t: _plain.broadcast(t, 1, p.name)),
    "broadcast_": (one, lambda p, t: _plain.broadcast_(t, 1, p.name)),
    "isend, irecv": (
        sent_and_received,
        lambda p, t, into: [_plain.isend(t, p.after, 4, p.name), _plain.irecv(into, p.before, 4, p.name)],
    ),
    "batch_p2p_ops": (
        sent_and_received,
        lambda p, *t: messages_at_once(p, ["isend", "irecv"], [p.after, p.before], list(t)),
    ),
    "autograd all_to_all_single": (wide, lambda p, t: _autograd.all_to_all_single(t, p.even, p.even, p.name)),
    "autograd all_gather_into_tensor": (one, lambda p, t: _autograd.all_gather_into_tensor(t, p.size, p.name)),
    "autograd reduce_scatter_tensor": (wide, lambda p, t: _autograd.reduce_scatter_tensor(t, "sum", p.size, p.name)),
}
#: What waits for the others, as each row does, and what torch makes of a tensor that another has to wait for.
WAITING = {f"_c10d_functional::{name}" for name in ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd")}
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


def operators_of(names: str) -> set[str]:
    namespace, plain = NAMESPACES[names.startswith("autograd ")], names.removeprefix("autograd ")
    return {f"{namespace}::{name}" for name in plain.split(", ")}


def torch_has(*namespaces: str) -> set[str]:
    return {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.partition("::")[0] in namespaces}


def functionals() -> list[str]:
    """Those that this torch has: the newest ones all."""
    return [names for names in FUNCTIONALS if operators_of(names) <= torch_has(*NAMESPACES)]


def called(names: list[str], group: Any, compiler: str) -> Results:
    """Functional operators in one program: what they return, and then the tensors that they were given."""
    place, plain = place_of(group), torch.ops._c10d_functional
    given = [FUNCTIONALS[each][0](place) for each in names]
    counts = [len(tensors) for tensors in given]

    def program(*tensors: torch.Tensor) -> Results:
        results: Results = []
        for each, count in zip(names, counts, strict=True):
            made = FUNCTIONALS[each][1](place, *tensors[:count])
            tensors = tensors[count:]
            results += [plain.wait_tensor(tensor) for tensor in (made if isinstance(made, (list, tuple)) else [made])]
        return results

    flat = [tensor for tensors in given for tensor in tensors]
    return [*compiled(program, compiler)(*flat), *flat]


def compiled(program: Callable[..., Results], compiler: str) -> Callable[..., Results]:
    return program if compiler == "eager" else torch.compile(program, backend=compiler, fullgraph=True)


def compare(wanted: Results, got: Results, name: str) -> list[str]:
    same = len(wanted) == len(got) and all(torch.equal(mine, its) for mine, its in zip(got, wanted, strict=True))
    return [] if same else [f"{name}: {got}, and gloo {wanted}"]
