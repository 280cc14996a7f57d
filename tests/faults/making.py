"""Groups that are made while something fails on one rank."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from failures import ALLOCATION, ME, MOST, TIMEOUT, Faults, counts, notes, outcome_of, problem, works
from mpi4py import MPI
from sampling import FULL

from torchmpi_plugin.communicator import communicator, membership, shared_memory
from torchmpi_plugin.communicator.steps import Steps
from torchmpi_plugin.node import shared_files
from torchmpi_plugin.store import checkin

#: What fails, of what, and how.
IN_PYTHON = (
    ("os", ("open",), OSError(errno.ENOMEM, "injected")),
    ("os", ("posix_fallocate",), OSError(errno.ENOSPC, "injected")),
    ("Segment", ("Segment",), OSError(errno.ENOMEM, "injected")),
    # Not what comes between a rank's word that it is there and MPI_Comm_create_group, which has no deadline.
    ("store", ("set", "delete_key"), RuntimeError("the store is broken")),
    ("MPI", ("Iallgather", "Iallgatherv"), MPI.Exception(MPI.ERR_OTHER)),
)


class Failure:
    """One call of ``names``, the ``number``-th of all behind its proxies, raises ``error``; 0: none."""

    def __init__(self, names: tuple[str, ...], number: int, error: Exception) -> None:
        self.names, self.left, self.error = names, number, error
        self.armed = number > 0

    @property
    def happened(self) -> bool:
        return self.armed and self.left <= 0

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return function(*arguments, **named)


class Proxy:
    """Stands before a module or an object."""

    def __init__(self, thing: Any, failure: Failure) -> None:
        self._thing, self._failure = thing, failure

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        if name not in self._failure.names:
            return found
        return lambda *arguments, **named: self._failure.call(found, *arguments, **named)


class FailingSteps(Steps):
    """Steps on a communicator that fails."""

    def __init__(self, failure: Failure, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._failure = failure

    def make(self, call: Callable[[], Any]) -> Any:
        made = super().make(call)
        self.comm = Proxy(made, self._failure)
        return made


@contextmanager
def in_python(thing: str, failure: Failure) -> Iterator[Failure]:
    if thing == "store":
        check_in = checkin.CheckIn
        patch: AbstractContextManager[Any] = mock.patch.object(
            membership, "CheckIn", lambda store, *more: check_in(Proxy(store, failure), *more)
        )
    elif thing == "Segment":
        patch = mock.patch.object(communicator, thing, getattr(Proxy(communicator, failure), thing))
    elif thing == "MPI":
        patch = mock.patch.object(membership, "Steps", functools.partial(FailingSteps, failure))
    else:
        patch = ExitStack()
        for module in (shared_memory, shared_files):
            patch.enter_context(mock.patch.object(module, thing, Proxy(getattr(module, thing), failure)))
    with patch:
        yield failure


def making(what: str, failing: AbstractContextManager[Any], victim: int) -> bool:
    """Make a group while something fails on one rank; whether it did."""
    made: list[Any] = []
    with failing as failure:
        outcome = outcome_of(what, lambda: made.append(dist.new_group(None, timeout=3 * TIMEOUT)))
    happened = bool(notes.bcast(failure.happened, root=victim))
    outcomes = notes.allgather(outcome)
    counts["cases"] += 1
    counts["failures"] += happened
    if not happened and set(outcomes) != {"right"}:
        problem(f"{what}: {outcomes}, and nothing had failed")
    if made:  # where another rank has none, an error within the timeout
        after = works(made[0], f"after {what}")
        if after != "right" and set(outcomes) == {"right"}:
            problem(f"{what}: every rank has a group, which fails: {after}")
        dist.destroy_process_group(made[0])
    notes.Barrier()
    return happened


def walk_groups(faults: Faults) -> None:
    """Each allocation, and each of the calls above: of those that cost others their deadline, the first and another."""
    for victim in range(dist.get_world_size()):
        for number in range(1, MOST):
            what = f"making a group, failing allocation {number} on rank {victim}"
            if not making(what, faults.armed(ALLOCATION, number if victim == ME else 0), victim):
                break
        for thing, names, error in IN_PYTHON:
            for number in range(1, MOST) if FULL or thing != "MPI" else (1, 4 + victim):
                what = f"making a group, failing {thing}.{'/'.join(names)} {number} on rank {victim}"
                failure = Failure(names, number if victim == ME else 0, error)
                if not making(what, in_python(thing, failure), victim):
                    break
