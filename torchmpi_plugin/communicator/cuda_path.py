"""The path of CUDA tensors: staged through host memory, or handed to MPI itself.

Which MPI calls an operation makes depends on it, so all ranks must take the same path. They agree once, when the world
is made; subgroups are parts of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..mpi import cuda_aware, runtime
from ..names import log
from .steps import Steps

_PROBE_SECONDS = 30.0
_PROBE_TAG = 1
_PROBE_ELEMENTS = 1024


class Path(NamedTuple):
    """The path of this world's CUDA tensors; reductions are staged, or computed on the device."""

    direct: bool
    why: str
    ipc: bool = False  # as the user asked: ranks of a node may read each other's devices

    @property
    def name(self) -> str:
        """As the variable ``MPIPLUS_CUDA`` has it."""
        return "direct" if self.direct else "ipc" if self.ipc else "staged"


current = Path(False, "no group has been made")
#: Buffers of a probe that did not come to its end, which MPI may still use.
_kept: list[Any] = []


def others() -> list[Path]:
    """The paths beside :data:`current` that this world's CUDA tensors could take."""
    why = "beside the other paths"
    return [path for path in (Path(False, why, ipc=True), Path(False, why)) if path.name != current.name]


@contextmanager
def taking(path: Path) -> Iterator[None]:
    """Groups that are made within take another path than the world; the same on all ranks."""
    global current  # noqa: PLW0603
    before, current = current, path
    try:
        yield
    finally:
        current = before


def choose(steps: Steps, option: str | None, local_rank: int) -> None:
    """Agree on the path: every rank of the new world calls this, with steps on its own communicator."""
    global current  # noqa: PLW0603
    wanted, place = cuda_aware.asked_for(option, os.environ)
    current = _first_refusal(steps.take(lambda: _own_choice(wanted, place)))
    if current.direct:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        problem = _probe(steps.comm, device)
        outcome = Path(not problem, problem or current.why)
        current = _first_refusal(steps.take(lambda: outcome))
        if not current.direct:
            log.warning("mpiplus: CUDA tensors are staged through host memory: %s", current.why)
    log.info("mpiplus: CUDA tensors: %s: %s", "handed to MPI" if current.direct else "staged", current.why)


def _first_refusal(paths: list[Path]) -> Path:
    refusals = [path._replace(why=f"rank {rank}: {path.why}") for rank, path in enumerate(paths) if not path.direct]
    return refusals[0] if refusals else paths[0]


def _own_choice(wanted: str, place: str) -> Path:
    direct, why = cuda_aware.path(cuda_aware.support_of(runtime.mpi(), os.environ), wanted, place)
    if direct and not torch.cuda.is_available():  # asked last: it wakes the driver up
        return Path(False, "torch sees no CUDA device")
    return Path(direct, why, wanted == "ipc")


def _probe(comm: Any, device: torch.device) -> str:
    """Send a small tensor on the device around the ring of all ranks; what went wrong, if anything.

    With the calls that messages are made of in C: a library may know device memory in some calls only.
    """
    mpi, rank, size = runtime.mpi(), comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    sent = torch.arange(_PROBE_ELEMENTS, dtype=torch.int32, device=device) + rank
    received = torch.full_like(sent, -1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # MPI knows no streams
    buffers = [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes) for tensor in (received, sent)]
    try:
        requests = [comm.Isend([buffers[1], mpi.BYTE], right, _PROBE_TAG)]
        until = time.monotonic() + _PROBE_SECONDS
        while len(requests) < 2 or not mpi.Request.Testall(requests):
            message = comm.Improbe(left, _PROBE_TAG) if len(requests) < 2 else None
            if message is not None:
                requests.append(message.Irecv([buffers[0], mpi.BYTE]))
            elif time.monotonic() > until:
                _kept.append((sent, received, buffers, requests))
                return f"a tensor on {device} that was sent as a test did not come within {_PROBE_SECONDS:g} s"
            time.sleep(0.0002)
    except mpi.Exception as error:
        _kept.append((sent, received, buffers))
        return f"a tensor on {device} that was sent as a test: {error}"
    if not torch.equal(received, sent - rank + left):
        return f"a tensor on {device} that was sent as a test came with the wrong contents"
    return ""
