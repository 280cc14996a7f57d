"""What happens when making a group goes wrong on one rank only."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say, wait_for, warnings_told

from torchmpi_plugin import protocol
from torchmpi_plugin.communicator import communicator, cuda_path, membership
from torchmpi_plugin.mpi import runtime
from torchmpi_plugin.store import checkin

FAILING = 1
SHORT = timedelta(seconds=3)
LONG = timedelta(seconds=90)


def no_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def failing(owner: Any, name: str) -> contextlib.AbstractContextManager[object]:
    """On one rank; tests/faults/making.py walks all that may fail, C's own allocations too."""
    return mock.patch.object(owner, name, no_memory) if ME == FAILING else contextlib.nullcontext()


def fails() -> None:
    """All ranks get the error, which names the failing one; the next group is made as if nothing had been."""
    dist.init_process_group("mpiplus", timeout=LONG)
    message = rf"creating group .* failed on rank {FAILING}: .*[Mm]emory"
    with failing(communicator.processes, "this"), raises(dist.DistBackendError, message) as caught:
        dist.new_group()
    assert (caught[0].__cause__ is not None) == (ME == FAILING)
    check_works()
    check_works(dist.new_group())
    dist.destroy_process_group()


def goes_without() -> None:
    """Shared memory that one rank cannot have is none for all, and no error."""
    dist.init_process_group("mpiplus", timeout=LONG)
    told = warnings_told()
    with failing(communicator.shared_files, "open_share"):
        groups = [dist.new_group() for _ in range(3)]
    words = [message for message in told if "no shared memory on this rank" in message]
    assert len(words) == (ME == FAILING), words  # once, where it is so
    for group in groups:
        assert not group.communicator.choice.own
        check_works(group)
    # Calls are compared all the same.
    with raises(dist.DistBackendError, "all_reduce", rf"rank {FAILING}\b"):
        dist.all_reduce(torch.ones(8 if ME == FAILING else 4), group=groups[0])
    check_works(groups[1])
    dist.destroy_process_group()


STOPPED_IN = {
    "steps": (communicator.processes, "this"),
    "MPI": (membership, "_create_group"),
    "world": (cuda_path, "_own_choice"),
}
VANISHES_IN = {**STOPPED_IN, "door": (checkin.CheckIn, "arrive")}


def stopped(where: str, directory: str) -> None:
    """The others do not wait for it for ever, and know whom they have waited for."""
    pids = runtime.mpi().COMM_WORLD.allgather(os.getpid())
    if where == "world":
        doing, make = "init_process_group", lambda: dist.init_process_group("mpiplus", timeout=SHORT)
    else:
        dist.init_process_group("mpiplus", timeout=LONG)
        doing, make = "creating group", lambda: dist.new_group(timeout=SHORT)

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise OSError("goes on")

    with mock.patch.object(*STOPPED_IN[where], stop) if ME == FAILING else contextlib.nullcontext():
        expected = rf"{doing}.* gave up after 3 s: rank {FAILING} began" if ME != FAILING else "goes on|gave up"
        with raises((dist.DistBackendError, OSError), expected):
            make()
    if ME != FAILING:
        (Path(directory) / f"gave-up-{ME}").touch()
    if ME == 0:
        for rank in range(SIZE):
            if rank != FAILING:
                wait_for(Path(directory) / f"gave-up-{rank}")
        os.kill(pids[FAILING], signal.SIGCONT)
    if where != "world":
        check_works()


def vanishes(where: str) -> None:
    """The others are told soon that it will not come, and can go on."""
    dist.init_process_group("mpiplus", timeout=LONG)
    check_works()

    def vanish(*_: object) -> None:
        Path("vanishes").touch()  # in the test's directory
        os._exit(0)

    with mock.patch.object(*VANISHES_IN[where], vanish) if ME == FAILING else contextlib.nullcontext():
        expected = (
            rf"creating group .*rank {FAILING} of the world has ended without a word|MPI.*|rank {FAILING} has died"
        )
        with raises(dist.DistBackendError, expected):
            dist.new_group()
    survivors = [Path(f"told-{rank}") for rank in range(SIZE) if rank != FAILING]
    Path(f"told-{ME}").touch()
    for survivor in survivors:
        wait_for(survivor)
    say("end")
    os._exit(0)  # MPI of two of three ranks cannot be finalised


def killed() -> None:
    """Rank 0 makes the file that all are to share, and dies before the others have it open."""
    create = communicator.create_file

    def create_and_die(*arguments: Any) -> int:
        create(*arguments)
        say("has made the file")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with mock.patch.object(communicator, "create_file", create_and_die):
        dist.init_process_group("mpiplus", timeout=LONG)
    time.sleep(1000)


def builds() -> None:
    """One rank has another build of mpiplus: all are told of both, before anything is shared."""
    pattern = rf"different builds of mpiplus.*\(protocol {protocol.PROTOCOL}\).*9\.9\.9 \(protocol 99\)"
    if ME == FAILING:
        protocol.PROTOCOL, protocol.version = 99, lambda name: "9.9.9"
    with raises(dist.DistBackendError, "init_process_group: the nodes", pattern, rf"rank {FAILING}\)"):
        dist.init_process_group("mpiplus", timeout=LONG)


if __name__ == "__main__":
    run(globals())
