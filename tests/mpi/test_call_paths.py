"""Calls that begin in C, and calls that come through Python: which are which, and what both leave and tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import inside
import pytest
import tensor_kinds as kinds
import torch
import torch.distributed as dist
from cases import Case
from groups import RANKS
from method_calls import options
from operation_table import API_MODE, MOVEMENT, REDUCTION, TABLE, of_kind
from started import run_case
from test_operations import groups_for, rows

from torchmpi_plugin import torch_internals

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*ComplexHalf:UserWarning", "ignore::UserWarning"),
    pytest.mark.skipif(torch_internals.tensor_exchange() is None, reason="this torch does not show its tensors to C"),
    pytest.mark.skipif(API_MODE != "direct", reason="asks the group itself"),
]
#: Of several c10d calls, or of none that C knows.
_NOT_IN_C = ("sparse", "coalesced", "monitored")
IN_C = [
    operation
    for operation in (TABLE["barrier"], *of_kind(MOVEMENT, REDUCTION))
    if not any(name in str(operation) for name in _NOT_IN_C)
]


def begun_in_c(group: Any, call: Callable[[], object]) -> int:
    before = inside.calls(group).in_c
    call()
    return int(inside.calls(group).in_c - before)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("operation", rows(IN_C))
def test_plain_calls_begin_in_c(operation, mode: str, all_groups) -> None:
    if mode not in operation.modes:
        pytest.skip("not an operation of this kind")
    for group in groups_for(operation, all_groups, "world", "reversed"):
        case = Case(group, mode=mode)
        begun = begun_in_c(group.process_group, lambda case=case: list(run_case(operation, case)))
        # Of messages some ranks have none.
        assert begun or "recv" in str(operation)


STRANGE: dict[str, Callable[[], torch.Tensor]] = {
    "strided": lambda: torch.ones(3, 2)[:, 0],
    "a subclass": lambda: torch.ones(3).as_subclass(kinds.Marked),
    "a negative view": lambda: kinds.negative(torch.ones(1)),
    "a negative view of no dimension": lambda: kinds.negative(torch.tensor(1.0)),
    "sparse": lambda: torch.ones(3).to_sparse(),
}


@pytest.mark.parametrize("name", STRANGE)
def test_other_tensors_go_through_python(name: str, group, world) -> None:
    tensor = STRANGE[name]()
    assert begun_in_c(group, lambda: dist.all_reduce(tensor)) == 0
    assert tensor.to_dense().reshape(-1).tolist() == [world.size] * tensor.numel()


def test_parameters_go_through_c(group, world) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert begun_in_c(group, lambda: dist.all_reduce(parameter.data)) == 1
    with torch.no_grad():
        assert begun_in_c(group, lambda: dist.all_reduce(parameter)) == 1
    assert parameter.tolist() == [world.size**2] * 3


def test_what_c_leaves_to_python(group, new_group, world) -> None:
    """A profiler, a call with names, more time, collected calls; and afterwards it is C's again. PREMUL_SUM is."""
    tensor = torch.ones(2)
    with torch.profiler.profile():
        assert begun_in_c(group, lambda: dist.all_reduce(tensor)) == 0
    assert begun_in_c(group, lambda: group.allreduce([tensor], op=dist.ReduceOp.SUM).wait()) == 0
    factor = dist._make_nccl_premul_sum(0.5)
    assert begun_in_c(group, lambda: dist.all_reduce(tensor, op=factor)) == 1
    assert tensor.tolist() == [world.size**3 / 2] * 2
    mine = new_group(None)
    mine._add_ephemeral_timeout(timedelta(seconds=20))
    assert begun_in_c(mine, lambda: dist.all_reduce(tensor, group=mine)) == 0

    def collected() -> None:
        mine._start_coalescing(torch.device("cpu"))
        dist.all_reduce(tensor, group=mine)
        assert len(inside.works_of(mine._end_coalescing(torch.device("cpu")))) == 1

    assert begun_in_c(mine, collected) == 0
    assert begun_in_c(mine, lambda: dist.all_reduce(tensor, group=mine)) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_work_says(asynchronous: bool, group, world) -> None:
    said = []
    for python_only in (True, False):
        with inside.through_python(group, python_only):
            tensor = torch.ones(3)
            how = options(dist.distributed_c10d.AllreduceOptions, asyncOp=asynchronous)
            work = group.allreduce([tensor], how)
            assert work.wait()
            future = work.get_future().wait()
            said.append((work.result()[0] is tensor, future[0] is tensor, work.is_completed(), work.is_success()))
            assert work.exception() is None and isinstance(work, dist.Work)
    assert said[0] == said[1] == (True, True, True, True)


@pytest.fixture
def entries(monkeypatch) -> list[Any]:
    """What the flight recorder is given from now on."""
    found: list[Any] = []

    class Recorder:
        append = found.append

    monkeypatch.setattr("torchmpi_plugin.diagnosis.flight_recorder.current", Recorder)
    return found


def test_the_flight_recorder_sees_both(group, entries) -> None:
    for python_only in (True, False):
        with inside.through_python(group, python_only):
            dist.all_reduce(torch.ones(3, 4, dtype=torch.int16))
            dist.all_gather_into_tensor(torch.empty(2 * RANKS), torch.ones(2))
            dist.all_gather([torch.empty(2) for _ in range(RANKS)], torch.ones(2))
    through_p, through_c = (
        [(entry.subject, entry.operation, entry.message, entry.peer, entry.inputs, entry.outputs) for entry in half]
        for half in (entries[:3], entries[3:])
    )
    assert through_c == through_p
    first = entries[0].collective
    assert [entry.collective for entry in entries] == list(range(first, first + 6))
    assert all(before.number < after.number for before, after in itertools.pairwise(entries))
