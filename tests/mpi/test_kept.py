"""No operation keeps a tensor once its caller has let go of it, whichever way it was called."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from groups import Group, on_gloo
from method_calls import FORMS, SEVERAL, is_left_to_newer_gloo, made
from operation_table import MOVEMENT, REDUCTION, of_kind
from operator_tables import boxed_sum, called, functionals, needs_operators, operators
from patience import patient
from sampling import share
from started import MODES, run_case

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def a_mode() -> Any:
    from torch.distributed.tensor.debug import CommDebugMode  # slow to import

    return CommDebugMode()


#: What a call is made in.
AROUND: dict[str, Callable[[], Any]] = {"": nullcontext, "a mode": a_mode, "the profiler": torch.profiler.profile}
SOON = patient(5)
#: Over gloo as well: it registers the Work of a send with a tensor that nobody can wait for.
KEPT_BY_TORCH = {"isend, irecv"}


def others_than(known: Collection[int]) -> list[torch.Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and id(thing) not in known]


def kept_by(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """The calls after which tensors stay that were not there before; each is made once to fill caches first."""
    found = []
    gc.freeze()  # what there is already is not to be looked at again and again
    for name, call in calls.items():
        call()
        before = others_than(())
        known = {id(tensor) for tensor in before}
        call()
        give_up = time.monotonic() + SOON  # the background may hold one that was polled for a second
        while (left := [tuple(tensor.shape) for tensor in others_than(known)]) and time.monotonic() < give_up:
            time.sleep(0.01)
        if left:
            found.append(f"{name}: {left}")
    gc.unfreeze()
    return found


def of_the_table(group: Group, most: int = len(MODES)) -> Iterator[tuple[str, Callable[[], Any]]]:
    for operation in share("kept: operations", of_kind(MOVEMENT, REDUCTION), 3):
        for mode in operation.modes[:most]:
            case = Case(group, mode=mode)
            yield f"{operation} {mode}", lambda operation=operation, case=case: list(run_case(operation, case))


def of_methods(group: Group) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, make in {**FORMS, **SEVERAL}.items():
        if not is_left_to_newer_gloo(name):
            yield name, lambda make=make: made(group.process_group, make(group.rank, group.size))


def of_operators(group: Group, op: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in operators(group.process_group, op):
        yield name, lambda name=name: operators(group.process_group, op)[name]()
    for name in [name for name in functionals() if name not in KEPT_BY_TORCH]:
        yield f"functional {name}", lambda name=name: called([name], group.process_group, "eager")


@pytest.mark.parametrize("around", AROUND)
def test_the_front_end_keeps_nothing(world: Group, around: str) -> None:
    def within(call: Callable[[], Any]) -> None:
        with AROUND[around]():
            call()

    within(gc.collect)  # imports what it needs before that is frozen, or each collection would go through it
    calls = of_the_table(world, 2 if around else len(MODES))
    assert kept_by({name: lambda call=call: within(call) for name, call in calls}) == []


@needs_operators
def test_methods_and_operators_keep_nothing(channel, world: Group) -> None:
    op = on_gloo(channel, boxed_sum)
    assert kept_by(dict([*of_methods(world), *of_operators(world, op)])) == []


@needs_operators
def test_nothing_is_kept_of_a_group_that_is_destroyed(channel, world: Group, new_group) -> None:
    op = on_gloo(channel, boxed_sum)

    def live_and_end() -> None:
        made = dist.new_group()
        group = Group("short-lived", made, world.ranks, world.rank)
        for _, call in (*of_the_table(group), *of_methods(group), *of_operators(group, op)):
            call()
        dist.destroy_process_group(made)

    assert kept_by({"a group": live_and_end}) == []
