"""Every allocation of the C code, and every call of MPI's, fails once: in every operation, on one rank.

Run by test_faults.py under mpiexec, on the shim that build.py makes; not a test of its own. What is wanted each time:
an error or the right result, on every rank, within the group's timeout; and a group that does not say it has failed
works.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mpi"))

import groups
import torch
import torch.distributed as dist
from cases import Case
from mpi4py import MPI
from operation_table import BARRIER, MOVEMENT, OPERATIONS, REDUCTION
from started import Operation, run_case

from torchmpi_plugin import checkin, communicator, mpi_runtime

TIMEOUT = timedelta(seconds=float(os.environ.get("MPIPLUS_FAULTS_TIMEOUT", "2")))
ALLOCATION, CALL_OF_MPI = 0, 1
KINDS = {ALLOCATION: "allocation", CALL_OF_MPI: "call of MPI"}
MOST = 40
LONGEST = 60.0
#: Rows of the table that make several calls, of which the others make the rest when one of them has failed here.
WITH_MORE_CALLS = ("monitored_barrier", "recv_any_source", "irecv_any_source", "sparse_all_reduce")
IN_ALL_MODES = ("all_reduce", "all_to_all")
#: What a failure may look like to the user; a DistBackendError is a RuntimeError.
ERRORS = (RuntimeError, MemoryError)
#: The ranks' ways to compare notes, past the backend under test.
notes = MPI.COMM_WORLD.Dup()
ME = notes.Get_rank()
problems: list[str] = []
counts = {"cases": 0, "failures": 0, "groups": 0}


def problem(text: str) -> None:
    problems.append(text)
    print(f"rank {ME}: {text[:600]}", flush=True)


def outcome_of(what: str, job: Callable[[], Any]) -> str:
    """What came of it: "right" or an error's name. Wrong results are noted."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)  # a hang ends the run, and says where
    try:
        found = job()
    except ERRORS as error:
        return type(error).__name__
    if found:
        problem(f"{what}: {found}")
    return "right"


class Faults:
    """The counters in the shim."""

    def __init__(self) -> None:
        mpi_runtime.mpi()
        name = "_shim_ptr" if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p) else "_shim_int"
        self.lib = ctypes.CDLL(sys.modules[f"torchmpi_plugin.{name}"].__file__)
        self.lib.faults_happened.restype = ctypes.c_long

    @contextmanager
    def armed(self, kind: int, number: int) -> Iterator[None]:
        self.lib.faults_arm(kind, ctypes.c_long(number), int(MPI.ERR_OTHER))
        try:
            yield
        finally:
            self.happened = bool(self.lib.faults_happened())
            self.lib.faults_arm(kind, ctypes.c_long(0), 0)

    happened = False


# ---- operations ----


def new_group() -> groups.Group:
    counts["groups"] += 1
    ranks = tuple(range(dist.get_world_size()))
    return groups.Group("faulty", dist.new_group(None, timeout=TIMEOUT), ranks, ME)


def works(group: Any, what: str) -> str:
    """An all_reduce: whether it is right, or how it failed."""

    def check() -> str:
        tensor = torch.full((5,), ME + 1.0)
        dist.all_reduce(tensor, group=group)
        size = dist.get_world_size()
        return "" if tensor.tolist() == [size * (size + 1) / 2] * 5 else f"the next all_reduce gave {tensor.tolist()}"

    return outcome_of(what, check)


def says_usable(group: Any) -> bool:
    return group._broken is None


def one_case(operation: Operation, group: groups.Group, mode: str, kind: int, number: int, faults: Faults) -> bool:
    """Whether the failure came about."""
    what = f"{operation} ({mode}), failing {KINDS[kind]} {number}"
    case = Case(
        group, torch.bfloat16 if operation.kind == REDUCTION and not operation.dtypes else torch.float32, mode=mode
    )
    with faults.armed(kind, number if ME == 0 else 0):
        outcome = outcome_of(what, lambda: "; ".join(run_case(operation, case)))
    happened = bool(notes.bcast(faults.happened))
    usable = notes.allgather(says_usable(group.process_group))
    if not happened and outcome != "right":
        problem(f"{what}: {outcome}, and nothing had failed")
    counts["cases"] += 1
    counts["failures"] += happened
    if happened and all(usable):
        after = notes.allgather(works(group.process_group, f"after {what}"))
        if set(after) != {"right"}:
            problem(f"{what}: all ranks said that the group can be used, then: {after}")
    elif not usable[ME] and works(group.process_group, f"after {what}") != "DistBackendError":
        problem(f"{what}: the group has failed, and does not say so")
    return happened


def walk(operation: Operation, mode: str, kind: int, faults: Faults) -> None:
    group = new_group()
    for number in range(1, MOST):
        happened = one_case(operation, group, mode, kind, number, faults)
        if not all(notes.allgather(says_usable(group.process_group))):
            dist.destroy_process_group(group.process_group)
            group = new_group()
        if not happened:
            break
    else:
        problem(f"{operation}: more than {MOST} {KINDS[kind]}s")
    dist.destroy_process_group(group.process_group)


# ---- groups ----


class Failing:
    """Stands before a module or an object; the ``number``-th call of one of ``names`` raises ``error``."""

    def __init__(self, thing: Any, names: tuple[str, ...], number: int, error: Exception) -> None:
        self._thing, self._names, self._left, self._error = thing, names, number, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        return self._counted(found) if name in self._names else found

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._error
            return function(*arguments, **named)

        return call

    @property
    def happened(self) -> bool:
        return self._left <= 0


def making(what: str, prepared: Callable[[], Any], victim: int, faults: Faults | None) -> bool:
    """Make a group while something fails on one rank; whether it did."""
    made: list[Any] = []

    def make() -> None:
        made.append(dist.new_group(None, timeout=TIMEOUT))

    with prepared() as failing:
        outcome = outcome_of(what, make)
    failing = faults if faults is not None else failing
    happened = bool(notes.bcast(failing.happened if victim == ME else None, root=victim))
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


@contextmanager
def in_python(thing: str, names: tuple[str, ...], number: int) -> Iterator[Failing]:
    if thing == "store":
        make, failings = checkin.CheckIn.__init__, []

        def init(self: Any, store: Any, *arguments: Any) -> None:
            failing = failings[0] if failings else Failing(store, names, number, RuntimeError("the store is broken"))
            failing._thing = store
            failings[:] = [failing]
            make(self, failing, *arguments)

        with mock.patch.object(checkin.CheckIn, "__init__", init):
            yield Failing(None, (), number, RuntimeError()) if number <= 0 else Lazily(failings)
        return
    failing = Failing(getattr(communicator, thing), names, number, OSError(errno.ENOMEM, "injected"))
    with mock.patch.object(communicator, thing, failing):
        yield failing


class Lazily:
    """What the first of a list, which may be empty yet, says."""

    def __init__(self, failings: list[Failing]) -> None:
        self._failings = failings

    @property
    def happened(self) -> bool:
        return bool(self._failings) and self._failings[0].happened


IN_PYTHON = (
    ("os", ("open",)),
    ("os", ("posix_fallocate",)),
    ("mmap", ("mmap",)),
    # Not what comes between a rank's word that it is there and MPI_Comm_create_group, which has no deadline.
    ("store", ("set", "delete_key")),
)


def walk_groups(faults: Faults) -> None:
    for victim in range(dist.get_world_size()):
        for number in range(1, MOST):
            what = f"making a group, failing allocation {number} on rank {victim}"
            if not making(
                what, lambda n=number, v=victim: faults.armed(ALLOCATION, n if v == ME else 0), victim, faults
            ):
                break
        for thing, names in IN_PYTHON:
            for number in range(1, MOST):
                what = f"making a group, failing {thing}.{'/'.join(names)} {number} on rank {victim}"
                wanted = number if victim == ME else 0
                if not making(what, lambda t=thing, n=names, w=wanted: in_python(t, n, w), victim, None):
                    break


def main() -> None:
    torch.set_num_threads(1)
    os.environ["MPIPLUS_EXIT_GRACE"] = "0.05"
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    faults = Faults()
    wanted = sys.argv[1:]
    walk_groups(faults)
    for operation in OPERATIONS:
        if operation.kind not in (MOVEMENT, REDUCTION, BARRIER) or operation.name in WITH_MORE_CALLS:
            continue
        if wanted and operation.name not in wanted:
            continue
        modes = [mode for mode in ("sync", "wait") if mode in operation.modes]
        for mode in modes if operation.name in IN_ALL_MODES else modes[:1]:
            for kind in KINDS:
                walk(operation, mode, kind, faults)
    everywhere = sum(notes.allgather(len(problems)))
    if ME == 0:
        print(f"faults: {counts}, {everywhere} problems", flush=True)
    notes.Barrier()
    # What other ranks have begun of a collective over MPI that failed here stays pending: no orderly end is possible.
    sys.stdout.flush()
    if everywhere or MPI.COMM_WORLD.Get_size() == 1:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
