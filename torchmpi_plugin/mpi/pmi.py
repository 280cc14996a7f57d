"""Messages between MPICH and its process manager, where MPI_Init or MPI_Finalize cannot do it alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping

_M_PERTURB = -6  # of glibc's malloc.h
#: The connection to the server of ``bootstrap.py``, which is in no variable; -1: there is none.
connection = -1


def by_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether ``srun --mpi=pmi2`` started this process."""
    return "PMI_FD" in environment and "SLURM_PROCID" in environment


@contextlib.contextmanager
def memory_of_zeros() -> Iterator[None]:
    """Within, malloc gives memory of zeros, if Slurm's PMI-2 is asked.

    MPICH 5.0 sends structures there that it has filled in part, as text in which a run of equal bytes is short. With
    what a large program has left in its heap the text is longer than Slurm (22.05) reads at once: it says "invalid
    client request", and all ranks wait in MPI_Init for ever, in some of a hundred starts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if by_slurm(os.environ) else None
    if mallopt is None:  # not glibc
        yield
        return
    mallopt(_M_PERTURB, 0xFF)  # new memory gets the complement
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)


def finalize(environment: Mapping[str, str]) -> bool:
    """Say to the process manager what MPI_Finalize says, where it cannot be called itself; wait for all ranks' ends.

    Returns:
        False: this process manager speaks another language than PMI-1, or has gone.
    """
    descriptor = connection if connection >= 0 else int(environment.get("PMI_FD", -1))
    if descriptor < 0 or by_slurm(environment):
        return False
    with contextlib.suppress(OSError), open(descriptor, "r+b", buffering=0, closefd=False) as wire:
        for command, answer in ((b"barrier_in", b"cmd=barrier_out"), (b"finalize", b"cmd=finalize_ack")):
            wire.write(b"cmd=" + command + b"\n")
            if not wire.readline().startswith(answer):
                return False
        return True
    return False
