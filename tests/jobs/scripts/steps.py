"""What the scripts share: who they are, saying so, and the checks of a world that works."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

faulthandler.register(signal.SIGUSR1)  # the test asks a job that hangs where it does

TORCH_VARIABLES = [f"{kind}{name}" for name in ("RANK", "WORLD_SIZE") for kind in ("", "LOCAL_")]
TORCH_VARIABLES += ["NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]


def _launchers_word(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


#: From the launcher, as MPI must not be started by asking it.
ME = _launchers_word("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK", default=0)
SIZE = _launchers_word("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", default=1)


def say(text: object) -> None:
    """One line, in one piece, whatever the other ranks print."""
    os.write(1, f"[{ME}] {text}\n".encode())


def warnings_told() -> list[str]:
    """What our logger warns of from now on."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("torchmpi_plugin").addHandler(handler)
    return told


@contextlib.contextmanager
def groups_made_by(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Communicators are made by what ``change`` makes of that which makes them."""
    from torchmpi_plugin.communicator import membership  # starts MPI, which some scripts do themselves

    with mock.patch.object(membership, "_create_group", change(membership._create_group)):
        yield


def run(scenarios: Mapping[str, Any]) -> None:
    """Run the scenarios that the command line names, then print the mark that the test looks for."""
    torch.set_num_threads(1)
    for number, name in enumerate(sys.argv[1].split("+")):
        if number and dist.is_initialized():
            dist.destroy_process_group()
        scenarios[name](*sys.argv[2:])
    say("end")


@contextlib.contextmanager
def raises(
    kinds: type[BaseException] | tuple[type[BaseException], ...], *patterns: str
) -> Iterator[list[BaseException]]:
    """The block raises one of ``kinds``, and each pattern is in the message; the error is then in the list."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
        for pattern in patterns:
            assert re.search(pattern, str(error)), f"no {pattern!r} in {type(error).__name__}: {error}"
    else:
        raise AssertionError(f"nothing was raised, where {kinds} with {patterns} was expected")


def wait_for(path: Path) -> None:
    """Wait for another rank's sign; the job's own limit ends it if that never comes."""
    while not path.exists():
        time.sleep(0.01)


def check_works(group: dist.ProcessGroup | None = None) -> None:
    """An operation of each kind gives the right result."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensor = torch.full((5,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size * (size + 1) / 2] * 5, tensor
    outputs = [torch.zeros(3, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(outputs, torch.full((3,), rank), group=group)
    assert [output[0].item() for output in outputs] == list(range(size)), outputs
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        received = torch.zeros(2)
        requests = [
            dist.irecv(received, group=group, group_src=left),
            dist.isend(torch.full((2,), float(rank)), group=group, group_dst=right),
        ]
        for request in requests:
            request.wait()
        assert received.tolist() == [float(left)] * 2, received
    dist.barrier(group)
