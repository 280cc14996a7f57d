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


def detail() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, of one node only, all ranks hear at once who calls what."""
    if ME == LAST:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("mpiplus", timeout=timedelta(seconds=60))
    words = "detected mismatch between collectives on ranks", r"of \(4,\) float32;.* of \(5,\) float32"
    with raises(dist.DistBackendError, *words):
        dist.all_reduce(torch.ones(5 if ME == LAST else 4))
    check_works()


def disagreeing() -> dict[str, Callable[[dist.ProcessGroup], dist.Work]]:
    """What the others call without the last rank, by what the error says of it, if they differ and should not.

    Each waits for the last rank's data: of two that exchange data first, MPI might report a message too long.
    """
    count, given = 4 + ME, [1 + rank for rank in range(SIZE)]
    return {
        r"all_reduce of \(7,\) float32 on rank 0, broadcast of \(7,\) float32 on rank 1$": lambda group: (
            dist.broadcast(torch.ones(7), LAST, group=group, async_op=True)
            if ME
            else dist.all_reduce(torch.ones(7), group=group, async_op=True)
        ),
        r"broadcast of \(4,\) float32 on rank 0, broadcast of \(5,\) float32 on rank 1$": lambda group: dist.broadcast(
            torch.ones(count), LAST, group=group, async_op=True
        ),
        "": lambda group: dist.all_to_all_single(
            torch.ones(given[ME] * SIZE), torch.ones(sum(given)), [given[ME]] * SIZE, given, group=group, async_op=True
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
    works = [call(group) for group, call in zip(groups, calls.values(), strict=True)]
    for work, pattern in zip(works, calls, strict=True):
        arrived = rf"Not arrived: rank {LAST} \(does not wait"
        with raises(dist.DistBackendError, "timed out", arrived, pattern) as caught:
            work.wait()
        assert bool(pattern) == ("they call different operations: " in str(caught[0])), caught[0]
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
        "other group": rf"Not arrived: rank {LAST} \(waits for all_reduce of \(2,\) float32.*world's ranks 0, {LAST}",
    }
    for where, pattern in patterns.items():
        is_elsewhere(where, pattern)
        check_works()


def is_elsewhere(where: str, pattern: str) -> None:
    told = [Path(f"{where}-{rank}") for rank in range(LAST)]  # in the test's directory
    group = dist.new_group(timeout=SHORT)
    other = dist.new_group([0, LAST], timeout=timedelta(seconds=60))
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
    if where == "other group" and ME in (0, LAST):
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
