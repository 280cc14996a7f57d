"""Facts that the MPI library gives once it is initialised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...flavours import Library
from ...mpi import cuda_aware

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_ABIS = {"openmpi": "Open MPI's", "mpich": "MPICH's", "mpiabi": "the MPI-5 standard's"}


def describe(module: Any, library: Library) -> dict[str, Any]:
    """Return what an initialised ``mpi4py.MPI`` says besides."""
    levels = [getattr(module, f"THREAD_{name}") for name in _LEVELS]
    return {
        "vendor": library.vendor,
        "version": library.version,
        "text": library.headline,
        "standard": ".".join(map(str, module.Get_version())),
        "abi": f"{_ABIS[library.abi]} ({library.abi})" if library.abi else "that which mpi4py was built for",
        "path": library.path or "unknown",
        "thread_level": f"MPI_THREAD_{_LEVELS[levels.index(module.Query_thread())]}",
        "cuda": _cuda(module, os.environ),
    }


def _cuda(module: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return whether MPI takes CUDA buffers, how mpiplus therefore moves CUDA tensors, and why we think so."""
    support = cuda_aware.support_of(module, environment)
    try:
        direct, why = cuda_aware.path(support, *cuda_aware.asked_for(None, environment))
    except ValueError as error:
        direct, why = False, str(error)
    path = "handed to MPI, if a test at the start agrees" if direct else "staged through host memory"
    return {"aware": support.aware, "why": support.why, "path": path, "path_why": why}
