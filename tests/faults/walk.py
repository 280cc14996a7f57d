"""Every allocation of the C code, and every call of MPI's, fails once, on one rank.

Run by test_faults.py under mpiexec, on the shim that build.py makes; not a test of its own. What is wanted each time:
an error or the right result, on every rank, within the group's timeout; and a group that does not say it has failed
works. In each operation fails what is in a place of the code where nothing has failed yet, or else any one; under
``MPIPLUS_TEST_FULL`` all, one after the other.

Arguments: how many elements (5), and the operations' names (all).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mpi"))

import groups
import inside
import torch
import torch.distributed as dist
from cases import Case
from failures import ALLOCATION, KINDS, ME, MOST, TIMEOUT, Faults, counts, notes, outcome_of, problem, problems, works
from making import walk_groups
from one_sided import WINDOW
from operation_table import BARRIER, MOVEMENT, REDUCTION, of_kind
from sampling import FULL, share
from sampling import dice as seeded
from started import Operation, run_case

#: Rows of the table that make several calls, of which the others make the rest when one of them has failed here.
WITH_MORE_CALLS = ("monitored_barrier", "recv_any_source", "irecv_any_source", "sparse_all_reduce")
IN_ALL_MODES = ("all_reduce", "all_to_all")
#: Where an operation waits for its Work, and the call polls first.
BY_CALLER = "wait, moved by the caller"
ROWS = [row for row in of_kind(MOVEMENT, REDUCTION, BARRIER) if row.name not in WITH_MORE_CALLS] + [WINDOW]
#: A change walks every other one, so that it takes half as long.
WALKED = share("operations in which each call fails", ROWS, 2)


def new_group() -> groups.Group:
    counts["groups"] += 1
    ranks = tuple(range(dist.get_world_size()))
    return groups.Group("faulty", groups.new_group(None, TIMEOUT), ranks, ME)


def is_usable(group: groups.Group) -> bool:
    """Whether it says so."""
    return inside.broken(group.process_group) is None


class Target(NamedTuple):
    """What fails: the ``number``-th call of a kind, of those from ``site`` if that is not 0."""

    kind: int
    number: int
    site: int = 0

    def __str__(self) -> str:
        return f"failing {KINDS[self.kind]} {self.number}" + (f" from {self.site:#x}" if self.site else "")


NOTHING = Target(ALLOCATION, 0)
NUMEL = int(sys.argv[1]) if len(sys.argv) > 1 else 5
WANTED = sys.argv[2:]
#: On rank 0: the places where calls come from, with what to run to get there; those where one has failed.
seen: dict[Target, tuple[Operation, str]] = {}
hit: set[Target] = set()
dice = seeded("faults")


def one_case(operation: Operation, group: groups.Group, mode: str, target: Target, faults: Faults) -> bool:
    """Whether the failure came about."""
    what = f"{operation} ({mode}), {target}"
    dtype = torch.bfloat16 if operation.kind == REDUCTION and not operation.dtypes else torch.float32
    case = Case(group, dtype, (NUMEL,), mode=mode.partition(",")[0])
    mover = groups.moved_by("caller" if mode == BY_CALLER else "background")
    with mover, faults.armed(*(target if ME == 0 else NOTHING)):
        outcome = outcome_of(what, lambda: "; ".join(run_case(operation, case)))
    happened = bool(notes.bcast(faults.happened))
    usable = notes.allgather(is_usable(group))
    if not happened and outcome != "right":
        problem(f"{what}: {outcome}, and nothing had failed")
    counts["cases"] += 1
    counts["failures"] += happened
    in_place = group.process_group.communicator.choice.own and operation is not WINDOW  # which is many calls
    if happened and target.kind == ALLOCATION and in_place and not all(usable):
        problem(f"{what}: over shared memory the group goes on, but here: {inside.broken(group.process_group)}")
    if happened and all(usable):
        after = notes.allgather(works(group.process_group, f"after {what}"))
        if set(after) != {"right"}:
            problem(f"{what}: all ranks said that the group can be used, then: {after}")
    elif not usable[ME] and works(group.process_group, f"after {what}") != "DistBackendError":
        problem(f"{what}: the group has failed, and does not say so")
    return happened


def new_group_if_failed(group: groups.Group) -> groups.Group:
    if all(notes.allgather(is_usable(group))):
        return group
    dist.destroy_process_group(group.process_group)
    return new_group()


def walk_all(operation: Operation, mode: str, faults: Faults) -> None:
    """Let each call fail."""
    group = new_group()
    for kind in KINDS:
        for number in range(1, MOST):
            happened = one_case(operation, group, mode, Target(kind, number), faults)
            group = new_group_if_failed(group)
            if not happened:
                break
        else:
            problem(f"{operation}: more than {MOST} {KINDS[kind]}s")
    dist.destroy_process_group(group.process_group)


def walk_some(operation: Operation, mode: str, faults: Faults) -> None:
    """Let a call from each place fail where none has failed yet; and of each kind at least one."""
    group = new_group()
    one_case(operation, group, mode, NOTHING, faults)
    sites = faults.sites
    one_case(operation, group, mode, NOTHING, faults)
    repeated = faults.sites
    chosen: list[tuple[Target, bool]] = []
    for kind in sites:
        places = list(dict.fromkeys(Target(kind, 1, site) for site in sites[kind]))
        if ME == 0:
            seen.update({place: (operation, mode) for place in places})
        wanted = [place for place in places if place not in hit] or dice.sample(places, min(1, len(places)))
        chosen += [(place, place.site not in repeated[kind]) for place in wanted]
    for target, is_of_the_first in notes.bcast(chosen):
        if is_of_the_first:  # what a group takes once
            dist.destroy_process_group(group.process_group)
            group = new_group()
        if one_case(operation, group, mode, target, faults):
            hit.add(target)
        group = new_group_if_failed(group)
    dist.destroy_process_group(group.process_group)


def walk_missed(faults: Faults) -> None:
    """Go again where a call came, and then did not come when it was to fail."""
    for _ in range(5):
        missed = {(str(operation), mode) for target, (operation, mode) in seen.items() if target not in hit}
        for name, mode in notes.bcast(sorted(missed)):
            walk_some(next(operation for operation in ROWS if operation.name == name), mode, faults)
    for target in seen.keys() - hit:
        problem(f"{seen[target][0]}: {target} never came about")


def main() -> None:
    torch.set_num_threads(1)
    os.environ["MPIPLUS_EXIT_GRACE"] = "0.05"
    groups.pretend_hosts()
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    faults = Faults()
    if not WANTED or "groups" in WANTED:
        walk_groups(faults)
    walk = walk_all if FULL else walk_some
    for operation in ROWS if WANTED else WALKED:
        if WANTED and operation.name not in WANTED:
            continue
        modes: list[str] = [mode for mode in ("sync", "wait") if mode in operation.modes]
        modes += [BY_CALLER] if "wait" in modes else []
        for mode in modes if operation.name in IN_ALL_MODES else modes[:1]:
            walk(operation, mode, faults)
    walk_missed(faults)
    everywhere = sum(notes.allgather(len(problems)))
    if ME == 0:
        print(f"faults: {counts}, in {len(hit)} places, {everywhere} problems", flush=True)
    notes.Barrier()
    # What other ranks have begun of a collective over MPI that failed here stays pending: no orderly end is possible.
    sys.stdout.flush()
    os._exit(1 if everywhere else 0)


if __name__ == "__main__":
    main()
