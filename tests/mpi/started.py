"""An operation in flight: how it is completed, and how its results are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, gaps_untouched
from expected import as_bytes, difference, makes_sense
from groups import API_MODE
from patience import patient, wait_until
from sampling import FULL, is_in_share, number
from torch.distributed import DistBackendError

COMPLETION_SECONDS = patient(20)
MOST_SHOWN = 15
LONGEST_PROBLEM = 300

#: The worlds that share one run of the table. Three ranks run all of it at night, else one share that a seed picks.
SHARES = (1, 2, 4, 5)

SYNC = ("sync",)
# Below torch's own group a Work cannot be asked whether it is complete (docs/api-modes.md).
ASYNC = ("wait", "poll", "future") if API_MODE == "direct" else ("wait", "future")
MODES = (*SYNC, *ASYNC)

Lazy = torch.Tensor | Callable[[], torch.Tensor]


@dataclass
class Started:
    """What an operation has begun.

    works: the works (or futures) whose results are `outputs`; empty where it was synchronous.
    other_works: works that must complete too and give no result, as those of sends.
    outputs, expected: results and what they must be, or functions that tell once it is complete.
    untouched: inputs, each with what it must still hold.
    check: says what else is wrong once it is complete.
    """

    works: Sequence[Any] = ()
    outputs: Sequence[Lazy] = ()
    expected: Sequence[Lazy] = ()
    untouched: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    other_works: Sequence[Any] = ()
    check: Callable[[], Iterator[str]] | None = None


@dataclass(frozen=True)
class Operation:
    """A row of the table: how to start an operation, and for what it is defined."""

    name: str
    start: Callable[[Case], Started]
    kind: str
    modes: tuple[str, ...] = MODES
    min_size: int = 1
    op_names: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return self.name

    def takes(self, case: Case) -> bool:
        """Whether it is defined for the case's group, dtype and operation."""
        if case.size < self.min_size or (self.dtypes and case.dtype not in self.dtypes):
            return False
        return self.kind != "reduction" or makes_sense(case.dtype, case.op_name)


@dataclass
class Failures:
    """Collects what is wrong, so that all ranks run through the same cases whatever happens."""

    found: list[str] = field(default_factory=list)
    cases: int = 0
    left_out: int = 0

    def run(self, operation: Operation, case: Case) -> None:
        """Run one case, if it is ours. A failure of the backend itself ends the test at once: ranks may differ."""
        if not is_ours(f"{operation} {case}"):
            self.left_out += 1
            return
        self.cases += 1
        try:
            problems = list(run_case(operation, case))
        except DistBackendError as error:
            raise DistBackendError(f"{operation} {case}: {error}") from error
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        self.found += [f"{operation} {case}: {problem}" for problem in problems]

    def report(self) -> None:
        assert self.cases or self.left_out, "there was no case"
        if self.found:
            shown = [problem[:LONGEST_PROBLEM] for problem in self.found[:MOST_SHOWN]]
            heading = f"{len(self.found)} problems in {self.cases} cases, the first of them:"
            pytest.fail("\n".join([heading, *shown]), pytrace=False)


def is_ours(case: str) -> bool:
    """Each number of ranks of SHARES runs a share that is its alone; three ranks run another one after each change."""
    if FULL:
        return True
    size, shares = dist.get_world_size(), len(SHARES)
    share = SHARES.index(size) if size in SHARES else number("the table on 3 ranks", shares)
    return is_in_share(case, share, shares)


def run_case(operation: Operation, case: Case) -> Iterator[str]:
    """Start one operation, complete it as the case says, and tell what is wrong with it."""
    started = operation.start(case)
    values = complete(started, case.mode)
    outputs = [resolve(output) for output in started.outputs]
    op_name = case.op_name if operation.kind == "reduction" else ""
    expected = [resolve(wanted) for wanted in started.expected]
    for place, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if wrong := difference(output, wanted, op_name):
            yield f"result {place} {wrong}"
    for tensor, original in started.untouched:
        if wrong := difference(tensor, original):
            yield f"an input was changed: it {wrong}"
    if started.check:
        yield from started.check()
    if values is not None and outputs:
        yield from future_problems(values, outputs)
    for output in outputs:
        if not gaps_untouched(output):
            yield "bytes between a result's elements were written"


def works_of(work: Any) -> Sequence[Any]:
    """Of what a function or a coalescing block returned."""
    return [] if work is None else getattr(work, "works", [work])


def in_flight(operations: Sequence[Operation], *cases: Case) -> list[str]:
    """What is wrong where all that can wait are begun with each case before the first is waited for, the last first."""
    begun = [
        (operation, case, operation.start(case))
        for case in cases
        for operation in operations
        if "wait" in operation.modes and operation.min_size <= case.size
        if operation.name != "irecv_any_source"  # it could take another operation's message
    ]
    problems = []
    for operation, case, started in reversed(begun):
        complete(started, "wait")
        already = Operation(operation.name, lambda _, s=started: s, operation.kind)
        problems += [f"in flight, {operation} {case}: {text}" for text in run_case(already, case)]
    return problems


def resolve(lazy: Lazy) -> torch.Tensor:
    return lazy if isinstance(lazy, torch.Tensor) else lazy()


def complete(started: Started, mode: str) -> list[Any] | None:
    """Bring an operation to its end; the values of its futures, if that is how."""
    if mode == "sync":
        return None
    assert started.works or started.other_works, "async_op=True gave no work"
    if mode == "poll":
        poll([*started.works, *started.other_works])
        return None
    values = None
    if mode == "future":
        values = [as_future(work).wait() for work in started.works]
        waited = started.other_works
    else:
        waited = [*started.works, *started.other_works]
    for work in waited:
        work.wait()
    return values


def as_future(work: Any) -> torch._C.Future:
    return work if isinstance(work, torch._C.Future) else work.get_future()


def poll(works: Sequence[Any]) -> None:
    """Wait until works are complete by themselves, without a call that could push them."""
    for work in works:
        done = work.done if isinstance(work, torch._C.Future) else work.is_completed
        wait_until(done, COMPLETION_SECONDS, f"{work} did not complete by itself", 0.0001)


def future_problems(values: list[Any], outputs: list[torch.Tensor]) -> Iterator[str]:
    if any(not isinstance(value, (list, tuple)) for value in values):
        yield f"a future resolved to {type(values[0]).__name__}, not to a list of tensors"
        return
    got = [as_bytes(dense(tensor)) for tensor in flatten(values)]
    want = [as_bytes(tensor) for tensor in outputs]
    if not got or not torch.equal(torch.cat(got), torch.cat(want)):
        yield "the future did not resolve to the result tensors"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def flatten(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from flatten(value)
