"""Every operation of the table over dtypes, shapes, layouts, groups and ways to complete."""

from __future__ import annotations

import itertools
import os
import time
import zlib

import inside
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, LAYOUTS, SHAPES, Case
from expected import FLOAT_OPS, REDUCE_OPS, as_bytes, difference, makes_sense, reduced, same_numbers
from groups import Group, assert_usable
from operation_table import BARRIER, MOVEMENT, OBJECTS, OPERATIONS, REDUCTION, TABLE, of_kind
from placements import A_NODE_EACH, PLACEMENTS, Placed
from started import Failures, Operation, in_flight, run_case

import torchmpi_plugin
from torchmpi_plugin.communicator.communicator import Communicator
from torchmpi_plugin.operations import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*ComplexHalf:UserWarning")

#: Operations of the product's table that have no row of this name: messages, and what only torch 2.15 has.
ELSEWHERE = {"send", "recv", "gather_single"}

TENSOR_OPERATIONS = of_kind(MOVEMENT, REDUCTION)
EVERY_CASE_TAKES = {"even_odd", "reversed", "world", "alone", "rotated"}


def rows(operations: list[Operation]):
    """Test parameters; an operation that needs two ranks is left out of a world of one."""
    return [
        pytest.param(operation, marks=pytest.mark.mpi(min_size=operation.min_size), id=str(operation))
        for operation in operations
    ]


def groups_for(operation: Operation, groups: dict[str, Group], *families: str) -> list[Group]:
    return [
        group
        for family, group in groups.items()
        if group.size >= operation.min_size and (not families or family in families)
    ]


def dtypes_of(operation: Operation, op_name: str) -> list[torch.dtype]:
    dtypes = list(operation.dtypes or DTYPES)
    if operation.kind == REDUCTION:
        return [dtype for dtype in dtypes if makes_sense(dtype, op_name)]
    return dtypes


def shapes_of(operation: Operation) -> list[tuple[int, ...]]:
    return list(operation.shapes or SHAPES)


def test_the_table_is_complete() -> None:
    """Each operation of the product has a row, whatever the order of the words in its name."""
    tried = {frozenset(name.split("_")) for name in TABLE}
    assert {name for name in BY_NAME if frozenset(name.split("_")) not in tried} == ELSEWHERE
    assert len(TABLE) == len(OPERATIONS)


@pytest.mark.parametrize("operation", rows(TENSOR_OPERATIONS))
def test_dtypes(operation: Operation, all_groups, failures: Failures) -> None:
    for group in groups_for(operation, all_groups):
        for dtype, mode in itertools.product(dtypes_of(operation, "SUM"), operation.modes[:2]):
            failures.run(operation, Case(group, dtype, (5,), mode=mode))


@pytest.mark.parametrize("operation", rows(TENSOR_OPERATIONS))
def test_shapes(operation: Operation, all_groups, failures: Failures) -> None:
    for group in groups_for(operation, all_groups, *EVERY_CASE_TAKES):
        for shape, mode in itertools.product(shapes_of(operation), operation.modes):
            failures.run(operation, Case(group, torch.float32, shape, mode=mode))


@pytest.mark.parametrize("operation", rows([operation for operation in TENSOR_OPERATIONS if not operation.shapes]))
def test_long_ones_with_a_node_each(operation: Operation, placed: Placed, failures: Failures) -> None:
    """There chunks may be longer than slots."""
    group = placed(A_NODE_EACH)
    for dtype, shape in ((torch.float32, (200_003,)), (torch.bfloat16, (350_001,)), (torch.uint8, (1_000_001,))):
        if dtype in dtypes_of(operation, "SUM"):
            failures.run(operation, Case(group, dtype, shape, mode=operation.modes[-1]))


@pytest.mark.parametrize("who_knows", ["nobody", "rank 0", "all"])
def test_a_core_for_each_rank(who_knows: str, new_group, world, monkeypatch) -> None:
    """Then chunks are shorter, on all ranks or on none: who knows that the node has fewer tells the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(Communicator, "crowded", who_knows == "all" or (who_knows == "rank 0" and world.rank == 0))
    group = Group("made", new_group(list(world.ranks)), world.ranks, world.rank)
    for name, count in itertools.product(("broadcast", "reduce", "all_reduce"), (32_769, 70_001, 300_001)):
        assert list(run_case(TABLE[name], Case(group, torch.float32, (count,)))) == []


@pytest.mark.parametrize("operation", rows(TENSOR_OPERATIONS))
def test_layouts(operation: Operation, all_groups, failures: Failures) -> None:
    for group in groups_for(operation, all_groups, "world", "reversed"):
        for dtype, layout, shape, mode in itertools.product(
            (torch.float32, torch.bfloat16, torch.complex64, torch.bool),
            LAYOUTS,
            ((1,), (61, 60), (2, 3, 4, 5)),
            operation.modes[:2],
        ):
            if dtype in dtypes_of(operation, "SUM"):
                failures.run(operation, Case(group, dtype, shape, layout, mode))


@pytest.mark.parametrize("operation", rows(of_kind(REDUCTION)))
def test_reduce_ops(operation: Operation, all_groups, failures: Failures) -> None:
    for group in groups_for(operation, all_groups, "world", "even_odd"):
        for op_name in operation.op_names:
            for dtype, shape, mode in itertools.product(
                dtypes_of(operation, op_name), ((5,), (300,)), operation.modes[:2]
            ):
                failures.run(operation, Case(group, dtype, shape, mode=mode, op_name=op_name))


def test_where_the_next_number_will_do(monkeypatch) -> None:
    monkeypatch.setattr("expected.HOSTS", ["0", "1", "0", "1"])
    number, following = torch.tensor([1, 1 + torch.finfo(torch.bfloat16).eps]).bfloat16().split(1)
    assert [name for name in FLOAT_OPS if difference(following, number, name)] == ["MIN", "MAX"]


@pytest.mark.parametrize("op_name", REDUCE_OPS)
def test_reductions_without_meaning_are_refused(op_name: str, all_groups) -> None:
    """At once, on every rank, and the group goes on."""
    group = all_groups["world"]
    for dtype in DTYPES:
        if makes_sense(dtype, op_name):
            continue
        case = Case(group, dtype, op_name=op_name)
        for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
            if dtype.is_complex and name != "all_reduce":
                continue  # only there does torch's front end see a complex tensor
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                TABLE[name].start(case.with_(op_name=op_name))
    assert_usable(group.process_group)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_prefixes_wherever_the_ranks_are(placement: str, placed: Placed, failures: Failures) -> None:
    group = placed(placement)
    for name, dtype, shape in itertools.product(("scan", "exscan"), DTYPES, ((5,), (70_001,))):
        if makes_sense(dtype, "SUM"):
            failures.run(TABLE[name], Case(group, dtype, shape))


@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_a_prefix_has_no_mean(name: str, all_groups) -> None:
    with pytest.raises(ValueError, match=f"^{name}: AVG makes no sense for a prefix"):
        TABLE[name].start(Case(all_groups["world"], op_name="AVG"))
    with pytest.raises(TypeError, match=f"^{name}: op must be one of torch.distributed.ReduceOp.* not 'sum'$"):
        getattr(torchmpi_plugin, name)(torch.ones(1), "sum")


@pytest.mark.parametrize("operation", rows(TENSOR_OPERATIONS))
def test_in_many_chunks(operation: Operation, all_groups, failures: Failures) -> None:
    """The path of counts beyond 2^31-1, with the limit lowered to 256 bytes."""
    with inside.chunk_limit(256):
        for group in groups_for(operation, all_groups, "world", "reversed", "even_odd"):
            for dtype, shape, mode in itertools.product(
                (torch.float32, torch.bfloat16, torch.int8), ((5,), (3, 4), (1000,)), operation.modes[:2]
            ):
                if dtype in dtypes_of(operation, "SUM"):
                    failures.run(operation, Case(group, dtype, shape, mode=mode))


@pytest.mark.parametrize("operation", rows(of_kind(OBJECTS, BARRIER)))
def test_objects_and_barriers(operation: Operation, all_groups, failures: Failures) -> None:
    for group in groups_for(operation, all_groups):
        for mode in operation.modes:
            failures.run(operation, Case(group, mode=mode))


def test_everything_in_flight_at_once(all_groups) -> None:
    families = [all_groups[family] for family in ("world", "reversed", "even_odd") if family in all_groups]
    problems = [in_flight(TENSOR_OPERATIONS, Case(group, torch.float32, (3, 4), mode="wait")) for group in families]
    assert not any(problems), problems


SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5)
WITH_NAN = [
    dtype
    for dtype in DTYPES
    if dtype.is_floating_point
    and makes_sense(dtype, "MIN")
    and bool(torch.isnan(torch.tensor([SPECIAL[0]]).to(dtype).float()))
]


@pytest.mark.parametrize("op_name", ["MIN", "MAX", "SUM", "AVG", "PRODUCT"])
def test_special_values(op_name: str, all_groups) -> None:
    """NaN on one rank reaches all, infinities and zeros follow IEEE 754."""
    wrong = []
    for group, dtype in itertools.product(all_groups.values(), WITH_NAN):
        numbers = torch.tensor(list(itertools.product(SPECIAL, repeat=2)))
        given = [(numbers[:, 0] if rank == group.size - 1 else numbers[:, 1]).to(dtype) for rank in range(group.size)]
        tensor = given[group.rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op_name), group=group.process_group)
        expected = reduced(given, op_name)
        if not same_numbers(tensor, expected, op_name):
            wrong.append(f"{group} {dtype}: {tensor.float().tolist()} not {expected.float().tolist()}")
    if wrong:
        pytest.fail("\n".join(wrong[:10]), pytrace=False)


@pytest.mark.parametrize("op_name", REDUCE_OPS)
def test_all_reduce_is_bitwise_equal_on_all_ranks(op_name: str, all_groups, channel) -> None:
    """Numbers of very different sizes, so that another order of additions shows."""
    results = []
    for family, dtype, count in itertools.product(("world", "reversed"), DTYPES, (3, 1000, 70001)):
        if not makes_sense(dtype, op_name) or (count > 1000 and dtype.itemsize > 4):
            continue
        group = all_groups[family]
        tensor = Case(group, dtype, (count,), op_name=op_name).number(group.rank).clone()
        if dtype.is_floating_point and dtype.itemsize > 1:
            tensor *= torch.logspace(-3, 3, count).roll(group.rank).to(dtype)
        case = Case(group, op_name=op_name)
        dist.all_reduce(tensor, case.op, group=group.process_group)
        results.append((f"{family} {dtype} {count}", zlib.crc32(as_bytes(tensor).numpy())))
    of_rank_0 = channel.bcast(results)
    assert [name for (name, mine), (_, its) in zip(results, of_rank_0, strict=True) if mine != its] == []


@pytest.mark.parametrize("kind", ["barrier", "async barrier", "monitored_barrier"])
def test_nobody_leaves_a_barrier_before_all_have_come(kind: str, all_groups, channel) -> None:
    import torchmpi_plugin

    for late in range(channel.size):
        if channel.rank == late:
            time.sleep(0.05)
        came = time.monotonic()  # one clock for all processes of a node
        if kind == "monitored_barrier":
            torchmpi_plugin.monitored_barrier()
        elif kind == "barrier":
            dist.barrier()
        else:
            dist.barrier(async_op=True).wait()
        left = time.monotonic()
        times = channel.allgather((came, left))
        assert min(left for _, left in times) >= max(came for came, _ in times)
