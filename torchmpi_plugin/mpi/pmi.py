"""What MPI_Init of MPICH needs of the process where Slurm's PMI-2 carries its messages."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping

_M_PERTURB = -6  # of glibc's malloc.h


def by_slurm(environment: Mapping[str, str]) -> bool:
    """Whether ``srun --mpi=pmi2`` started this process."""
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
