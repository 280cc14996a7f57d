"""torch's operators, called by programs, by compiled ones and under TorchDispatchModes: what gloo makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from groups import API_MODE, on_gloo
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]
Results = list[torch.Tensor]
Program = Callable[[Any], Results]


@pytest.fixture
def gloo(world) -> Iterator[Any]:
    """For what is asked of it once, with a deadline; results to compare with come from ``on_gloo``."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    yield group
    dist.destroy_process_group(group)


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
    return on_gloo(channel, lambda gloo: {name: calls(gloo)[name]() for name in calls(gloo)})


def finished(returned: Any) -> None:
    dist.Work.unbox(returned[-1] if isinstance(returned, tuple) else returned).wait()


def operators(group: Any, op: Any) -> dict[str, Callable[[], Results]]:
    """Of ``torch.ops.c10d``, each on tensors of its own."""
    c10d, boxed, size, rank = torch.ops.c10d, group.boxed(), dist.get_world_size(), dist.get_rank()
    root, one, many, flat, piece = rank == 0, [ramp()], ramps(), ramp(4 * size), [torch.zeros(4)]
    lists, pair, flats = (
        [[torch.zeros(4), torch.zeros(2)] for _ in range(size)],
        [ramp(), ramp(2)],
        torch.zeros(4 * size),
    )
    both, wide = [torch.zeros(4 * size), torch.zeros(2 * size)], [ramp(4 * size), ramp(2 * size)]
    after, before = (rank + 1) % size, (rank - 1) % size

    def of(call: Callable[[], Any], results: Results) -> Callable[[], Results]:
        return lambda: (finished(call()), results)[1]

    def passed_on(anyone: bool) -> Results:
        sent = c10d.send([ramp()], boxed, after, 3)
        finished(c10d.recv_any_source_(piece, boxed, 3) if anyone else c10d.recv_(piece, boxed, before, 3))
        finished(sent)
        return piece

    return {
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


def lists_of(lists: list[Results]) -> Results:
    return [each[0] for each in lists]


def functionals(group: Any) -> dict[str, Callable[[], Results]]:
    """Of ``torch.ops._c10d_functional`` and ``_autograd``."""
    plain, autograd, size, rank = (
        torch.ops._c10d_functional,
        torch.ops._c10d_functional_autograd,
        dist.get_world_size(),
        dist.get_rank(),
    )
    name, even = group.group_name, [2] * size

    def of(call: Callable[[], Any]) -> Callable[[], Results]:
        def waited() -> Results:
            made = call()
            return [plain.wait_tensor(tensor) for tensor in (made if isinstance(made, (list, tuple)) else [made])]

        return waited

    pair, wide = (lambda: [ramp(), ramp(2)]), (lambda: [ramp(4 * size), ramp(2 * size)])
    found = {
        "all_reduce": of(lambda: plain.all_reduce(ramp(), "sum", name)),
        "all_reduce_": of(lambda: plain.all_reduce_(ramp(), "max", name)),
        "all_reduce_coalesced": of(lambda: plain.all_reduce_coalesced(pair(), "sum", name)),
        "all_reduce_coalesced_": of(lambda: plain.all_reduce_coalesced_(pair(), "sum", name)),
        "all_gather_into_tensor": of(lambda: plain.all_gather_into_tensor(ramp(), size, name)),
        "all_gather_into_tensor_out": of(
            lambda: plain.all_gather_into_tensor_out(ramp(), size, name, out=torch.zeros(4 * size))
        ),
        "all_gather_into_tensor_coalesced": of(lambda: plain.all_gather_into_tensor_coalesced(pair(), size, name)),
        "reduce_scatter_tensor": of(lambda: plain.reduce_scatter_tensor(ramp(2 * size), "sum", size, name)),
        "reduce_scatter_tensor_out": of(
            lambda: plain.reduce_scatter_tensor_out(ramp(2 * size), "sum", size, name, out=torch.zeros(2))
        ),
        "reduce_scatter_tensor_coalesced": of(lambda: plain.reduce_scatter_tensor_coalesced(wide(), "sum", size, name)),
        "all_to_all_single": of(lambda: plain.all_to_all_single(ramp(2 * size), even, even, name)),
        "broadcast": of(lambda: plain.broadcast(ramp(), 1, name)),
        "broadcast_": of(lambda: plain.broadcast_(ramp(), 1, name)),
        "autograd all_to_all_single": of(lambda: autograd.all_to_all_single(ramp(2 * size), even, even, name)),
        "autograd all_gather_into_tensor": of(lambda: autograd.all_gather_into_tensor(ramp(), size, name)),
        "autograd reduce_scatter_tensor": of(lambda: autograd.reduce_scatter_tensor(ramp(2 * size), "sum", size, name)),
    }
    if hasattr(plain, "batch_p2p_ops"):
        after, before = (rank + 1) % size, (rank - 1) % size
        found["batch_p2p_ops"] = of(
            lambda: plain.batch_p2p_ops(["isend", "irecv"], [after, before], [5, 5], [ramp(), torch.zeros(4)], name)
        )
    return found


def compare(wanted: Results, got: Results, name: str) -> list[str]:
    same = len(wanted) == len(got) and all(torch.equal(mine, its) for mine, its in zip(got, wanted, strict=True))
    return [] if same else [f"{name}: {got}, and gloo {wanted}"]


def test_operators_as_over_gloo(channel, group) -> None:
    op = on_gloo(channel, boxed_sum)
    wanted = results_on_gloo(channel, lambda gloo: operators(gloo, op))
    assert len(wanted) > 15
    assert not [line for name in wanted for line in compare(wanted[name], operators(group, op)[name](), name)]


@pytest.mark.mpi(min_size=2)
def test_operators_of_gloo_take_no_lock_for_ever(channel, group, world) -> None:
    """Its threads drop tensors, for which they want the GIL, under a lock that its operators want.

    So whoever calls one of its kernels must have released the GIL: ours, which comes first, included.
    """
    if world.size > 2:
        pytest.skip("no different on more ranks")
    group.boxed()
    op = on_gloo(channel, boxed_sum)
    for _ in range(10):
        on_gloo(channel, lambda gloo: [call() for call in operators(gloo, op).values()], 10)


def test_functional_operators_as_over_gloo(channel, group) -> None:
    wanted = results_on_gloo(channel, functionals)
    assert len(wanted) > 15
    assert not [line for name in wanted for line in compare(wanted[name], functionals(group)[name](), name)]


def test_a_work_from_an_operator_outlives_its_call(group, world) -> None:
    """C++ alone holds it, and asks it whether it is complete."""
    tensors = [torch.full((1 << 16,), float(world.rank)) for _ in range(20)]
    boxed = group.boxed()
    works = [torch.ops.c10d.broadcast_([tensor], boxed, 1, 0)[1] for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        finished(work)
        assert tensor.unique().tolist() == [1.0]


def test_other_groups_keep_their_operators(gloo, group, world) -> None:
    """Once ours stands in front of torch's: results, exceptions and Works of gloo are what they were."""
    group.boxed()
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, group=gloo, async_op=True)
    assert work.wait() and tensor.tolist() == [world.size] * 2
    with pytest.raises(RuntimeError, match="ProcessGroupGloo::broadcast: invalid root rank"):
        gloo.broadcast(torch.ones(1), world.size)


# ---- modes ----


def calls_of_front_end(group: Any) -> None:
    size, tensor = dist.get_world_size(), torch.ones(4)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.all_gather([torch.zeros(4) for _ in range(size)], tensor, group=group)
    dist.all_gather_into_tensor(torch.zeros(4 * size), tensor, group=group)
    dist.broadcast(tensor, 0, group=group)
    dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(4 * size), group=group)
    dist.all_to_all_single(torch.zeros(4 * size), torch.ones(4 * size), group=group)
    dist.barrier(group)
    functional.wait_tensor(functional.all_reduce(tensor, "sum", group))


def test_comm_debug_mode_counts_as_on_gloo(gloo, group) -> None:
    counts = []
    for each in (gloo, group):
        with CommDebugMode() as mode:
            calls_of_front_end(each)
        counts.append(dict(mode.get_comm_counts()))
    assert counts[0] == counts[1]
    assert sum(counts[1].values()) >= 8


@pytest.mark.skipif(API_MODE != "direct", reason="torch's own group gives its own Works")
def test_under_a_mode_a_work_stays_ours(group, world) -> None:
    with CommDebugMode():
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert type(work).__module__.startswith("torchmpi_plugin"), type(work)
        assert work.wait() and work.is_completed()


def test_two_modes_and_none(group, world) -> None:
    """Each sees a call once; one that is hidden from modes is carried out all the same."""
    tensor = torch.ones(2)
    with CommDebugMode() as outer, CommDebugMode() as inner:
        dist.all_reduce(tensor, group=group)
        with torch._C._DisableTorchDispatch():
            dist.all_reduce(tensor, group=group)
    for mode in (outer, inner):
        assert mode.get_total_counts() == 1
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [world.size**3] * 2


def test_errors_under_a_mode(group, world) -> None:
    with CommDebugMode(), pytest.raises(ValueError, match="root"):
        group.broadcast(torch.ones(1), world.size)
    with CommDebugMode(), pytest.raises(TypeError, match="incompatible"):
        group.broadcast(torch.ones(1), 0.5)


# ---- compiled ----


def gathers(group: Any, compiler: str) -> Results:
    """All-gathers that Inductor puts into buckets, a reduction and an exchange between them."""
    name, size = group.group_name, dist.get_world_size()
    plain = torch.ops._c10d_functional

    def program(a: torch.Tensor, b: torch.Tensor) -> Results:
        first = plain.all_gather_into_tensor(a * 2, size, name)
        second = plain.all_gather_into_tensor(b + 1, size, name)
        total = plain.all_reduce(a + b, "sum", name)
        third = plain.reduce_scatter_tensor(torch.cat([a] * size), "sum", size, name)
        fourth = plain.reduce_scatter_tensor(torch.cat([b] * size), "sum", size, name)
        waited = [plain.wait_tensor(tensor) for tensor in (first, second, total, third, fourth)]
        return [tensor.sin() for tensor in waited]

    return compiled(program, compiler)(ramp(), ramp(more=1))


def compiled(program: Callable[..., Results], compiler: str) -> Callable[..., Results]:
    return program if compiler == "eager" else torch.compile(program, backend=compiler, fullgraph=True)


def messages(group: Any, compiler: str) -> Results:
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size

    def program(tensor: torch.Tensor, received: torch.Tensor) -> Results:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor * 2, group=group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()
        return [received + 1]

    return compiled(program, compiler)(ramp(), torch.zeros(4))


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "buckets": {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"},
    "buckets, reordered": {"bucket_all_gathers_fx": "all", "reorder_for_compute_comm_overlap": True},
}


@pytest.fixture
def fresh_compiler(world, tmp_path, monkeypatch) -> Iterator[None]:
    if world.size > 3:
        pytest.skip("what is compiled on three ranks is compiled on more")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.timeout(400)  # every rank compiles C++; 24 s on three ranks and two idle cores
@pytest.mark.parametrize(
    ("compiler", "how"), [("eager", "as it is"), ("aot_eager", "as it is"), *(("inductor", how) for how in SETTINGS)]
)
def test_compiled_collectives_as_over_gloo(compiler: str, how: str, channel, group, fresh_compiler) -> None:
    import torch._inductor.config as inductor

    settings = {name: value for name, value in SETTINGS[how].items() if hasattr(inductor, name)}
    with inductor.patch(settings):
        wanted = on_gloo(channel, lambda gloo: gathers(gloo, compiler), 60)
        torch._dynamo.reset()
        assert not compare(wanted, gathers(group, compiler), how)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_compiled_messages_as_over_gloo(compiler: str, channel, group, fresh_compiler) -> None:
    import torch._dynamo.config as dynamo

    if not hasattr(dynamo, "enable_p2p_compilation"):
        pytest.skip("this torch does not compile messages")
    with dynamo.patch(enable_p2p_compilation=True):
        wanted = on_gloo(channel, lambda gloo: messages(gloo, compiler), 60)
        torch._dynamo.reset()
        assert not compare(wanted, messages(group, compiler), "messages")
