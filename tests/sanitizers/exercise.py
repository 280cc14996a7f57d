"""What runs under the sanitizers: every operation of the table in small cases, threads, errors, and an exit.

Run by tests/sanitizers/run under mpiexec; not a test of its own. A wrong result, a sanitizer's finding or
anything else than an orderly exit makes the job fail.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "soak"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mpi"))

import fake_cuda
import groups
import inside
import programs
import test_message_programs
import test_overlaps
import torch
import torch.distributed as dist
from cases import Case
from message_model import draw_complete
from operation_table import MOVEMENT, OPERATIONS, REDUCTION, of_kind
from sampling import FULL, is_in_share
from sampling import number as drawn
from started import Failures, Operation, in_flight
from torch.distributed import DistBackendError
from windows import KINDS, memory

from torchmpi_plugin.group.windows import Window
from torchmpi_plugin.mpi import runtime

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64)
# Nothing, less than a cache line, an odd length above the two-phase algorithm's limit, and several slots' worth.
SHAPES = ((0,), (5,), (3001,), (140_003,))  # the last is sent in chunks longer than slots, where each node has one rank
FAMILIES = ("world", "reversed", "even_odd", "alone")
CHUNK_LIMIT = 256
TURNS, ROUNDS = 30, 2
OVERLAPS, PROGRAMS = 20, 50
#: Three ranks share the cases among the ways that there are: shared memory, MPI's collectives, several hosts. Two ranks
#: run a half of them.
PATH = 2 if "MPIPLUS_TEST_HOST_OF" in os.environ else int(os.environ.get("MPIPLUS_SHM") == "0")


class Share(Failures):
    """Runs those cases that are this run's."""

    def run(self, operation: Operation, case: Case) -> None:
        of_three = dist.get_world_size() == 3
        share = (PATH, 3) if of_three else (drawn("the table under sanitizers", 2), 2)
        if FULL or is_in_share(f"{operation} {case}", *share):
            super().run(operation, case)


def table(all_groups: dict[str, groups.Group], failures: Failures) -> None:
    """Every operation: all dtypes small, all shapes in float32, in each mode, whole and in chunks."""
    cases = [(dtype, (5,)) for dtype in DTYPES] + [(torch.float32, shape) for shape in SHAPES]
    for operation, family in itertools.product(OPERATIONS, FAMILIES):
        group = all_groups.get(family)
        if group is None or group.size < operation.min_size:
            continue
        for (dtype, shape), mode in itertools.product(cases, operation.modes):
            run_if_it_fits(operation, Case(group, dtype, shape, mode=mode), failures)
        with inside.chunk_limit(CHUNK_LIMIT):
            for dtype, mode in itertools.product((torch.float32, torch.bfloat16), operation.modes):
                run_if_it_fits(operation, Case(group, dtype, (300,), mode=mode), failures)


def run_if_it_fits(operation: Operation, case: Case, failures: Failures) -> None:
    if operation.kind not in (MOVEMENT, REDUCTION):
        fits = case.dtype == torch.float32 and case.shape == (5,)
    else:
        fits = operation.takes(case) and not (operation.shapes and 0 in case.shape)  # a sparse tensor's rows
    if fits:
        failures.run(operation, case)


def flying(kind: type[Case], group: groups.Group) -> Case:
    return kind(group, torch.float32, (3001,), mode="wait")


def on_device(all_groups: dict[str, groups.Group], failures: Failures) -> None:
    """CUDA tensors over the stand-in for the driver, one after the other and all at once."""
    lib = runtime.shim().lib
    lib.mpp_set_stage_bytes(1 << 16)
    wanted = [operation for operation in of_kind(MOVEMENT, REDUCTION) if not operation.shapes]
    with fake_cuda.cuda_without_gpu(Path()) as driver, driver.on_stream(kernel_us=200):
        for operation, family, shape, direct in itertools.product(
            wanted, ("world", "even_odd"), ((5,), (100_003,)), (False, True)
        ):
            group = all_groups[family]
            inside.let_mpi_reach_devices([group.process_group], direct)
            for mode in operation.modes if group.size >= operation.min_size else ():
                failures.run(operation, fake_cuda.DeviceCase(group, torch.float32, shape, mode=mode))
        failures.found += in_flight(wanted, flying(fake_cuda.DeviceCase, all_groups["world"]))
        failures.found += driver.violations()


def threads(failures: Failures) -> None:
    """Two threads on groups of their own: the soak's random programs; a third one asks for completion."""
    streams = [
        programs.Stream(index, groups_of_thread, 1)
        for index, groups_of_thread in enumerate(programs.make_groups(timedelta(seconds=120)))
    ]
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            for work in list(programs.begun):
                work.is_completed()

    asker = threading.Thread(target=ask)
    asker.start()
    for _ in range(ROUNDS):
        programs.run_round(streams)
    over.set()
    asker.join()
    failures.found += [f"threads: {problem}" for stream in streams for problem in stream.problems]


def windows(failures: Failures) -> None:
    """Puts and signals from two threads, mapped and by messages; one window of each kind is left open."""
    me, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    right, left = (me + 1) % size, (me - 1) % size

    def talk(window: Any, target: torch.Tensor) -> None:
        for turn in range(TURNS):
            works = [window.put(torch.full((3001,), float(turn)), right, 0, True), window.signal(right, True)]
            window.wait_signal(left, turn % 2 == 0).wait()
            if target[:3001].unique().tolist() != [turn]:
                failures.found.append(f"windows: turn {turn}: {target[:3001].unique().tolist()}")
            window.signal(left, False)  # has read
            window.wait_signal(right, False)
            for work in works:
                work.wait()

    for deregister in (True, False):
        targets = [memory(group, kind, 40_003) for kind in KINDS]
        opened = [Window(group, number) for number in range(len(targets))]  # on every torch, past its own names
        for window, target in zip(opened, targets, strict=True):
            window.tensor_register(target)
        with inside.chunk_limit(CHUNK_LIMIT), ThreadPoolExecutor() as pool:
            list(pool.map(talk, opened, targets))
        for window in opened if deregister else ():
            window.tensor_deregister()


def overlapping(failures: Failures) -> None:
    """Results in the memory of inputs and of each other, through both call paths; and a long list."""
    group = dist.new_group(None)
    for name, number in itertools.product(test_overlaps.KINDS, range(OVERLAPS)):
        if problem := test_overlaps.run_case(name, number, group):
            failures.found.append(f"{name}: {problem}")
    storage = torch.ones(59)
    dist.all_reduce_coalesced([storage[at : at + 20] for at in range(40)], group=group)
    if storage.unique().tolist() != [dist.get_world_size()]:
        failures.found.append(f"a long list: {storage.unique().tolist()}")


def messages(failures: Failures) -> None:
    """Random programs that must complete."""
    group, size = dist.new_group(None), dist.get_world_size()
    channel = runtime.mpi().COMM_WORLD.Dup()
    for number in range(PROGRAMS):
        seed = f"{test_message_programs.SEED} {size} {number}"
        dice = random.Random(seed)
        program, count = draw_complete(dice, size), dice.choice(test_message_programs.COUNTS)
        if why := test_message_programs.failure_of(program, group, count, seed, channel):
            failures.found.append(f"program {number}: {why}")
            break
    channel.Free()


def dropped() -> None:
    """Works and tensors that nobody keeps complete all the same."""
    for turn in range(TURNS):
        dist.all_reduce(torch.full((5000,), float(turn)), async_op=True)
        dist.isend(torch.ones(5000), dist.get_rank(), tag=5)
        dist.irecv(torch.empty(5000), dist.get_rank(), tag=5)
    dist.barrier()


def errors(failures: Failures) -> None:
    """Errors found in C: a message too long, a receive given up, a collective that somebody misses, an abort."""
    me, size = dist.get_rank(), dist.get_world_size()

    def fails(what: str, job: Callable[[], object]) -> None:
        try:
            job()
        except DistBackendError:
            return
        failures.found.append(f"errors: {what} raised nothing")

    group = dist.new_group(None)
    sent = dist.isend(torch.ones(100), me, group=group, tag=1)
    fails("a message longer than its buffer", lambda: dist.recv(torch.empty(10), me, group=group, tag=1))
    sent.wait()
    dist.barrier()

    impatient = dist.new_group(None, timeout=timedelta(seconds=1))
    tensor = torch.ones(3001)
    if me:
        fails("an all_reduce without rank 0", lambda: dist.all_reduce(tensor, group=impatient))
    dist.barrier()
    if not me:  # what the others gave up comes to its end, or fails too: so nothing stays pending
        with contextlib.suppress(DistBackendError):
            dist.all_reduce(tensor, group=impatient)
    dist.barrier()

    different = dist.new_group(None)
    if size > 1:
        unlike = torch.ones(3001 if me else 5)
        fails("an all_reduce of different sizes", lambda: dist.all_reduce(unlike, group=different))

    aborted = dist.new_group(None, timeout=timedelta(seconds=5))
    if size > 1 and me == 0:
        work = dist.all_reduce(tensor, group=aborted, async_op=True)
        threading.Timer(0.3, aborted.abort).start()
        fails("an aborted all_reduce", work.wait)
    dist.barrier()
    # Rank 0's can end now too. Over MPI it has not begun: calls are compared first, and rank 0 has taken its own back.
    if me and os.environ.get("MPIPLUS_SHM") != "0":
        with contextlib.suppress(DistBackendError):
            dist.all_reduce(tensor, group=aborted)
    dist.barrier()


def main() -> int:
    torch.set_num_threads(1)
    groups.pretend_hosts()
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=120))
    failures = Share()
    all_groups = groups.make_groups(timedelta(seconds=120))
    table(all_groups, failures)
    for family in ("world", "reversed"):
        failures.found += in_flight(of_kind(MOVEMENT, REDUCTION), flying(Case, all_groups[family]))
    on_device(all_groups, failures)
    threads(failures)
    dropped()
    overlapping(failures)
    messages(failures)
    windows(failures)
    if "errors" in sys.argv[1:]:
        errors(failures)
    for problem in failures.found[:20]:
        print(f"rank {dist.get_rank()}: {problem[:500]}", flush=True)
    if dist.get_rank() == 0:
        print(f"exercise: {failures.cases} cases on {dist.get_world_size()} ranks", flush=True)
    if "destroy" in sys.argv[1:]:
        dist.destroy_process_group()
    return 1 if failures.found else 0


if __name__ == "__main__":
    sys.exit(main())
