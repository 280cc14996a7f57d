"""What is said about ranks that are late, elsewhere, gone, or call something else."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say, wait_for

LAST = SIZE - 1
SHORT = timedelta(seconds=3)
LONG = 1 << 22  # more elements than fit into the segment: who has come has not sent all of them


def wrong_calls() -> dict[str, Callable[[], object]]:
    """The last rank calls something else; by what the error says."""
    odd = ME == LAST
    return {
        r"broadcast of \(3,\) float32 with root 0;.* all_reduce \(SUM\) of \(3,\) float32": lambda: (
            dist.all_reduce(torch.ones(3)) if odd else dist.broadcast(torch.ones(3), 0)
        ),
        r"of \(4,\) float32;.* of \(5,\) float32": lambda: dist.all_reduce(torch.ones(5 if odd else 4)),
    }


def detail(where: str) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, perhaps of one node only, all ranks hear at once who calls what."""
    if where == "everywhere" or ME == LAST:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    check_works()
    check_works(dist.new_group())
    for pattern, call in wrong_calls().items():
        with raises(dist.DistBackendError, "detected mismatch between collectives on ranks", pattern):
            call()
        check_works()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.tolist() == [SIZE] * 3
    gathered = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": ME})
    assert gathered == [{"rank": rank} for rank in range(SIZE)]


def disagreeing() -> dict[str, tuple[str, Callable[[dist.ProcessGroup], dist.Work]]]:
    """What the others call without the last rank, by what differs; with what the error says of it, if anything.

    Each waits for the last rank's data: of two that exchange data first, MPI might report a message too long.
    """
    dtype, count = (torch.float32, 4) if ME else (torch.int32, 5)
    parts = [torch.ones(1 + rank) for rank in range(SIZE)]
    return {
        "operation": (
            r"all_reduce of \(7,\) float32 on rank 0, broadcast of \(7,\) float32 on rank 1$",
            lambda group: (
                dist.broadcast(torch.ones(7), LAST, group=group, async_op=True)
                if ME
                else dist.all_reduce(torch.ones(7), group=group, async_op=True)
            ),
        ),
        "dtype": (
            r"all_reduce of \(7,\) int32 on rank 0, all_reduce of \(7,\) float32 on rank 1$",
            lambda group: dist.all_reduce(torch.ones(7, dtype=dtype), group=group, async_op=True),
        ),
        "count": (
            r"broadcast of \(5,\) float32 on rank 0, broadcast of \(4,\) float32 on rank 1$",
            lambda group: dist.broadcast(torch.ones(count), LAST, group=group, async_op=True),
        ),
        "shape": (
            "",
            lambda group: dist.broadcast(torch.ones((2, 3) if ME else (6,)), LAST, group=group, async_op=True),
        ),
        "parts": ("", lambda group: dist.reduce_scatter(parts[ME].clone(), parts, group=group, async_op=True)),
        "splits": (
            "",
            lambda group: dist.all_to_all_single(
                torch.ones((1 + ME) * SIZE),
                torch.ones(sum(range(1, SIZE + 1))),
                [1 + ME] * SIZE,
                [1 + rank for rank in range(SIZE)],
                group=group,
                async_op=True,
            ),
        ),
    }


def disagree(directory: str) -> None:
    """The error at the deadline lists who calls what, where that differs and should not."""
    told = [Path(directory) / f"told-{rank}" for rank in range(LAST)]
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    calls = disagreeing()
    groups = [dist.new_group(timeout=timedelta(seconds=5)) for _ in calls]
    for group in groups:
        dist.barrier(group)
    if ME == LAST:
        load_batch(told)
        os._exit(5)  # not in order: nobody can take back what MPI waits for
    works = [call(group) for group, (_, call) in zip(groups, calls.values(), strict=True)]
    for work, (what, (pattern, _)) in zip(works, calls.items(), strict=True):
        with raises(
            dist.DistBackendError, "timed out", rf"Not arrived: rank {LAST} \(does not wait", pattern
        ) as caught:
            work.wait()
        assert bool(pattern) == ("they call different operations: " in str(caught[0])), (what, caught[0])
    told[ME].touch()
    load_batch(told)
    os._exit(5)


def load_batch(signs: list[Path]) -> None:
    """Until the others have what they wait for. They are told where this rank is: it calls no other Python function."""
    names = [str(sign) for sign in signs]
    for name in names:
        while not os.access(name, os.F_OK):
            time.sleep(0.01)


def elsewhere() -> None:
    """The error names the function, or the operation, that keeps the last rank from coming."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    patterns = {
        "computing": rf"Not arrived: rank {LAST} \(does not wait; its last call was .*load_batch",
        "receiving": rf"Not arrived: rank {LAST} \(waits for recv.* from rank 0.*in is_elsewhere",
        "other group": rf"Not arrived: rank {LAST} \(waits for all_reduce of \(2,\) float32",
    }
    for where, pattern in patterns.items():
        is_elsewhere(where, pattern)
        check_works()


def is_elsewhere(where: str, pattern: str) -> None:
    told = [Path(f"{where}-{rank}") for rank in range(LAST)]  # in the test's directory
    group = dist.new_group(timeout=SHORT)
    other = dist.new_group(timeout=timedelta(seconds=60))
    dist.barrier(group)
    if ME != LAST:
        with raises(dist.DistBackendError, "timed out", pattern, "arrived: ranks? 0"):
            dist.all_reduce(torch.ones(3), group=group)
        told[ME].touch()
    elif where == "computing":
        load_batch(told)
    elif where == "receiving":
        dist.recv(torch.ones(1), 0, group=other)
    if where == "receiving" and ME == 0:
        for sign in told:  # another rank may still be asking what the last one is doing
            wait_for(sign)
        dist.send(torch.ones(1), LAST, group=other)
    if where == "other group":
        dist.all_reduce(torch.ones(2), group=other)
    if ME == LAST:
        dist.all_reduce(torch.ones(3), group=group)  # the others' was given up, not taken back


def slow_peer(directory: str) -> None:
    """A line after a while, for which the last rank waits, and no error."""
    spoken = Path(directory) / "spoken"

    def note(record: logging.LogRecord) -> bool:
        if "has waited" in record.getMessage():
            spoken.touch()
        return True

    logging.getLogger("torchmpi_plugin").addFilter(note)  # not a handler: the line is to be printed all the same
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    check_works()
    if ME == LAST:
        load_batch([spoken])
    check_works()


def unheard_peer() -> None:
    """The same without a line: later than any would have come."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    check_works()
    if ME == LAST:
        time.sleep(5)
    check_works()


def vanishes(how: str, when: str = "elsewhere") -> None:
    """The last rank's process ends without a word, perhaps after it has come to the others' operation."""
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=100))
    check_works()
    halfway = when == "halfway"
    gone = Path("vanishes")  # in the test's directory
    if ME == LAST:
        if halfway:
            dist.all_reduce(torch.ones(LONG), async_op=True)
        gone.touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    if halfway:
        wait_for(gone)
        time.sleep(1)
    say("waits")
    dist.all_reduce(torch.ones(LONG if halfway else 3))
    say("came out of the collective")


if __name__ == "__main__":
    run(globals())
