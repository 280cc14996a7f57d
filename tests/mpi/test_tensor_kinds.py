"""Every operation with every kind of tensor: the right result, or an exception of gloo's kind before anything is sent.

What is only read stays as it is: memory, version, flags. Never a crash.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import inside
import pytest
import tensor_kinds as kinds
import torch
import torch.distributed as dist
from cases import Case
from expected import difference
from groups import RANKS, assert_usable
from operation_table import MOVEMENT, REDUCTION, of_kind
from started import Operation, Started, complete, resolve
from tensor_kinds import CaseOfKind, OfNumbers
from test_operations import rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SHAPE = (4,)
#: Of dense tensors. In place: the one tensor is both read and written.
DENSE = [operation for operation in of_kind(MOVEMENT, REDUCTION) if "sparse" not in str(operation)]
#: On one rank these have tensors of no elements, for which any memory will do: nothing to refuse.
EMPTY_ALONE = ("all_to_all_uneven", "all_to_all_single_splits")
REFUSING = [
    dataclasses.replace(operation, min_size=2) if operation.name in EMPTY_ALONE else operation for operation in DENSE
]
IN_PLACE = ("all_reduce", "coalesced_all_reduce", "all_reduce_coalesced", "scan", "exscan")
FROM_ANYONE = ("recv_any_source", "irecv_any_source")


def problems(operation: Operation, case: Case) -> Iterator[str]:
    started = operation.start(case)
    complete(started, case.mode)
    yield from wrong_results(operation, started)


def wrong_results(operation: Operation, started: Started) -> Iterator[str]:
    for place, (output, wanted) in enumerate(zip(started.outputs, started.expected, strict=True)):
        if wrong := difference(kinds.content(output), resolve(wanted), "SUM" if operation.kind == REDUCTION else ""):
            yield f"result {place} {wrong}"
    for tensor, original in started.untouched:
        if wrong := difference(kinds.content(tensor), original):
            yield f"an input was changed: it {wrong}"
    if started.check:
        yield from started.check()


def modes_of(operation: Operation) -> list[str]:
    return [mode for mode in ("sync", "wait") if mode in operation.modes]


def watched(make: Callable[[torch.Tensor], Any], seen: list[Any]) -> Callable[[torch.Tensor], Any]:
    def made(tensor: torch.Tensor) -> Any:
        found = make(tensor)
        seen.append((found, None if found.is_inference() else found._version, found.requires_grad))
        return found

    return made


# ---- kinds with which all compute ----


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", [*kinds.GOOD, *kinds.READ_ONLY])
@pytest.mark.parametrize("operation", rows(DENSE))
def test_results_are_right_and_what_is_read_stays_as_it_is(operation: Operation, kind: str, all_groups) -> None:
    """Some kinds in memory that the kernel lets nobody write to; all by autograd's count of changes."""
    world, found = all_groups["world"], []
    make = {**kinds.GOOD, **kinds.READ_ONLY}[kind]
    same = kind not in ("expanded", "zero")  # these hold other numbers than what they were made of
    written = make if kind in kinds.GOOD else torch.clone
    for mode in modes_of(operation):
        seen: list[Any] = []
        case = CaseOfKind(world, shape=SHAPE, mode=mode, read=watched(make, seen), written=written)
        if kind in kinds.READ_ONLY and (
            operation.name in IN_PLACE or (operation.name == "reduce" and case.rank == case.root)
        ):
            case = CaseOfKind(world, shape=SHAPE, mode=mode)  # of reduce, the root's tensor is written to
        with torch.no_grad():
            started = operation.start(case)
            complete(started, case.mode)
        if same:
            found += [f"{mode}: {problem}" for problem in wrong_results(operation, started)]
        elif started.check:
            found += started.check()
        for tensor, version, requires_grad in seen if operation.name not in (*IN_PLACE, "reduce", "broadcast") else ():
            now = None if tensor.is_inference() else tensor._version
            if (now, tensor.requires_grad) != (version, requires_grad):
                found.append(f"{mode}: version {version}, {requires_grad} became {now}, {tensor.requires_grad}")
    assert found == []
    assert_usable()


def results_in(transform: str, body: Callable[[Callable[[torch.Tensor], Any]], list[Any]]) -> list[torch.Tensor]:
    """What ``body`` returns from inside a transform of torch.func; it is given what makes tensors of that transform."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        results = body(lambda tensor: tensor + 0 * x.sum())
        return x.sum(), results

    one = torch.ones(2)
    if transform == "grad":
        return torch.func.grad(function, has_aux=True)(one)[1]
    return torch.func.functionalize(function)(one)[1]


@pytest.mark.cases(3)
@pytest.mark.parametrize("transform", ["functionalize", "grad"])
@pytest.mark.parametrize("operation", rows(DENSE))
def test_results_are_right_in_transforms(operation: Operation, transform: str, all_groups) -> None:
    world, found = all_groups["world"], []
    for mode in modes_of(operation):
        # Before, as the case's numbers are made once, and must not be of the transform.
        plain = operation.start(OfNumbers(world, shape=SHAPE, mode=mode))
        complete(plain, mode)
        expected = [resolve(wanted) for wanted in plain.expected]
        found += list(plain.check()) if plain.check else []

        def body(make: Callable[[torch.Tensor], Any], mode: str = mode) -> list[Any]:
            started = operation.start(CaseOfKind(world, shape=SHAPE, mode=mode, read=make, written=make))
            complete(started, mode)
            return list(started.outputs)

        results = results_in(transform, body)
        if operation.name not in FROM_ANYONE:  # in any order
            for place, (output, wanted) in enumerate(zip(results, expected, strict=True)):
                if wrong := difference(output.detach(), wanted, "SUM" if operation.kind == REDUCTION else ""):
                    found.append(f"{mode}: result {place} {wrong}")
        dist.barrier()  # or rank 0 might take somebody's next message for this
    assert found == []


@pytest.mark.mpi(min_size=2)
def test_the_roots_tensor_keeps_its_gradient(group, world) -> None:
    """autograd refuses a backward through what was changed meanwhile."""
    factors = torch.arange(6.0).view(2, 3).t()
    given = torch.ones(3, 2, requires_grad=True)
    total = (given * factors).sum()
    dist.broadcast(factors, 0)
    if world.rank == 0:
        total.backward()
        assert torch.equal(given.grad, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(factors, torch.arange(6.0).view(2, 3).t())


# ---- inference ----


@pytest.mark.parametrize("operation", rows(DENSE))
def test_asynchronous_results_in_inference_tensors(operation: Operation, all_groups) -> None:
    """The background puts them in place, outside inference mode, and the other way round."""
    found = []
    for mode in [mode for mode in operation.modes if mode != "sync"]:
        strided = OfNumbers(all_groups["world"], shape=SHAPE, layout="strided", mode=mode)
        case = CaseOfKind(
            all_groups["world"], shape=SHAPE, mode=mode, read=kinds.inference_strided, written=kinds.inference_strided
        )
        found += list(problems(operation, case))
        with torch.inference_mode():
            found += list(problems(operation, strided))
            found += list(problems(operation, case))
    assert found == []


# ---- refused ----


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", kinds.BAD)
@pytest.mark.parametrize("operation", rows(REFUSING))
def test_refused_on_the_rank_at_fault(operation: Operation, kind: str, all_groups) -> None:
    """One rank calls alone: it raises what gloo raises, has sent nothing, and the group works afterwards."""
    make, expected = kinds.BAD[kind]
    if kind == "uninitialized" and operation.name.startswith("coalesced"):
        # torch's own manager fails on it before a group is asked, and collects whatever comes next, on any backend
        pytest.skip("torch's coalescing manager cannot read it")
    found = []
    for offender in range(min(RANKS, 2)):
        world = all_groups["world"]
        if world.rank == offender:
            for mode in modes_of(operation):
                case = CaseOfKind(world, shape=SHAPE, mode=mode, read=make, written=make)
                error = raised(lambda case=case: operation.start(case))
                if not isinstance(error, expected) or isinstance(error, RecursionError):
                    found.append(f"{mode}: {error!r} is no {expected}")
        assert_usable()
    assert found == []


@pytest.mark.parametrize("make", [kinds.fake, operator.methodcaller("to", "meta")], ids=["fake", "meta"])
@pytest.mark.parametrize("operation", rows(REFUSING))
def test_without_elements_nothing_is_sent(operation: Operation, make: kinds.Make, all_groups) -> None:
    """Where all tensors of a call are fake or on meta, nothing happens, as torch has it; or an exception tells."""
    group = all_groups["world"]
    before = inside.count_of(group.process_group)
    if group.rank == 0:
        case = CaseOfKind(group, shape=SHAPE, read=make, written=make)
        error = raised(lambda: operation.start(case))
        assert error is None or isinstance(error, (RuntimeError, TypeError, AssertionError)), error
        assert not isinstance(error, ValueError), error  # as mpiplus's own are
        assert before == inside.count_of(group.process_group)
    assert_usable()


def test_results_without_memory_in_a_list(group, world) -> None:
    """The dispatcher takes a plain tensor's list of results for a kernel's, whatever is in it."""
    wrapped = [kinds.Wrapper(torch.zeros(3)) for _ in world.ranks]
    dist.all_gather(wrapped, torch.full((3,), float(world.rank)), group=group)
    assert [result.inside.tolist() for result in wrapped] == [[float(rank)] * 3 for rank in world.ranks]


def test_vmap(group) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    with pytest.raises(RuntimeError, match=r"Batching rule not implemented for c10d::allreduce_"):
        torch.func.vmap(function)(torch.ones(2, 3))
    assert_usable()


@pytest.mark.parametrize("name", ["int1", "uint7"])
def test_integers_of_a_few_bits_are_moved_and_not_reduced(group, name: str) -> None:
    """To C torch shows them as integers of 8 bits."""
    dtype = getattr(torch, name)
    tensor = torch.full((5,), group.rank(), dtype=torch.uint8).view(dtype)
    for reduce in (dist.all_reduce, lambda tensor, group: dist.reduce(tensor, 0, group=group)):
        with pytest.raises(TypeError, match=r"int\d cannot be reduced"):
            reduce(tensor, group=group)
    dist.broadcast(tensor, group_src=0, group=group)
    assert tensor.view(torch.uint8).eq(0).all()
    assert_usable()
