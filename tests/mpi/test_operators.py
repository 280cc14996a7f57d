"""torch's operators, called by programs and under TorchDispatchModes: what gloo makes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from groups import API_MODE, on_gloo
from operator_tables import (
    FUNCTIONALS,
    LEFT_TO_THE_BACKEND,
    NAMESPACES,
    NOT_OF_GLOO,
    WAITING,
    boxed_sum,
    called,
    compare,
    finished,
    functionals,
    needs_operators,
    operators,
    operators_of,
    results_on_gloo,
    torch_has,
)

pytestmark = [
    pytest.mark.mpi(min_size=2),
    needs_operators,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def gloo(world) -> Iterator[Any]:
    """For what is asked of it once, with a deadline; results to compare with come from ``on_gloo``."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    yield group
    dist.destroy_process_group(group)


def test_all_functional_operators_are_tried() -> None:
    tried = {operator for names in functionals() for operator in operators_of(names)}
    assert torch_has(*NAMESPACES) - tried <= WAITING
    assert torch.__version__ < "2.13" or functionals() == list(FUNCTIONALS)


#: Of ``c10d``, what sends nothing.
ALONE = {"c10d::check_for_nan"}


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="there a backend carries them out, and no kernel of ours")
def test_all_operators_are_tried(gloo, group) -> None:
    tried = {word for name in operators(group, boxed_sum(gloo)) for word in name.split()}
    assert torch_has("c10d") - {f"c10d::{word}" for word in tried} <= ALONE | LEFT_TO_THE_BACKEND | NOT_OF_GLOO


def test_operators_as_over_gloo(channel, group) -> None:
    """Many times: its threads drop tensors, for which they want the GIL, under a lock that its operators want.

    So whoever calls one of its kernels must have released the GIL: ours, which comes first, included.
    """
    group.boxed()
    op = on_gloo(channel, boxed_sum)
    for _ in range(8):
        wanted = results_on_gloo(channel, lambda gloo: operators(gloo, op))
    assert len(wanted) > 15
    assert not [line for name in wanted for line in compare(wanted[name], operators(group, op)[name](), name)]


def test_functional_operators_as_over_gloo(channel, group) -> None:
    names = functionals()
    wanted = on_gloo(channel, lambda gloo: {name: called([name], gloo, "eager") for name in names})
    assert len(wanted) > 15
    assert not [line for name in names for line in compare(wanted[name], called([name], group, "eager"), name)]


def test_a_work_from_an_operator_outlives_its_call(group, world) -> None:
    """C++ alone holds it, and asks it whether it is complete."""
    tensors = [torch.full((1 << 16,), float(world.rank)) for _ in range(20)]
    boxed = group.boxed()
    works = [torch.ops.c10d.broadcast_([tensor], boxed, 1, 0)[1] for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        finished(work)
        assert tensor.unique().tolist() == [1.0]


def test_wait_tensor_waits_for_calls_before_compiled_code(channel, group, world) -> None:
    """Rank 0 begins two on one storage, and the others only after that; who waits for a Work leaves the other one."""
    count = torch._C._distributed_c10d._get_work_registry_size
    tensor, before = torch.full((2, 1 << 16), world.rank + 1.0), count()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        if world.rank:
            channel.Barrier()
        works = [dist.all_reduce(row, group=group, async_op=True) for row in tensor]
        if not world.rank:
            assert count() == before + 2
            channel.Barrier()
    works[0].wait()
    torch.ops._c10d_functional.wait_tensor(tensor)
    assert tensor.unique().tolist() == [world.size * (world.size + 1) / 2] and count() <= before
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    while count() > before:  # not kept for ever, though taken out by whichever thread completes it
        time.sleep(0.001)


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
    from torch.distributed.tensor.debug import CommDebugMode  # slow to import

    counts = []
    for each in (gloo, group):
        with CommDebugMode() as mode:
            calls_of_front_end(each)
        counts.append(dict(mode.get_comm_counts()))
    assert counts[0] == counts[1]
    assert sum(counts[1].values()) >= 8


@pytest.mark.skipif(API_MODE != "direct", reason="torch's own group gives its own Works")
def test_under_a_mode_a_work_stays_ours(group, world) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode():
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert type(work).__module__.startswith("torchmpi_plugin"), type(work)
        assert work.wait() and work.is_completed()


def test_two_modes_and_none(group, world) -> None:
    """Each sees a call once; one that is hidden from modes is carried out all the same; errors are those without."""
    from torch.distributed.tensor.debug import CommDebugMode

    tensor = torch.ones(2)
    with CommDebugMode() as outer, CommDebugMode() as inner:
        dist.all_reduce(tensor, group=group)
        with torch._C._DisableTorchDispatch():
            dist.all_reduce(tensor, group=group)
        with pytest.raises(ValueError, match="root"):
            group.broadcast(torch.ones(1), world.size)
        with pytest.raises(TypeError, match="incompatible"):
            group.broadcast(torch.ones(1), 0.5)
    assert [mode.get_total_counts() for mode in (outer, inner)] == [1, 1]
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [world.size**3] * 2
