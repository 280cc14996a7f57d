"""What the MPI library says of itself once it is initialised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import cuda_aware

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_ABIS = {"openmpi": "Open MPI's", "mpich": "MPICH's", "mpiabi": "the MPI-5 standard's"}


def describe(module: Any) -> dict[str, Any]:
    """The library behind an initialised ``mpi4py.MPI``."""
    vendor, version = module.get_vendor()
    levels = [getattr(module, f"THREAD_{name}") for name in _LEVELS]
    abi = Path(module.__file__).name.split(".")[1]
    text = str(module.Get_library_version()).strip("\x00 \n")
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "text": " ".join(text.split("\n")[0].split())[:200],
        "standard": ".".join(map(str, module.Get_version())),
        "abi": f"{_ABIS[abi]} ({abi})" if abi in _ABIS else "that which mpi4py was built for",
        "path": _path(),
        "thread_level": f"MPI_THREAD_{_LEVELS[levels.index(module.Query_thread())]}",
        "cuda": _cuda(module, os.environ),
    }


def _path() -> str:
    """The file that this process has mapped."""
    with open("/proc/self/maps") as maps:
        files = sorted({line.split()[-1] for line in maps if "/libmpi" in line or "/libpmpi" in line})
    return next((file for file in files if "libmpi.so" in file or "libmpich" in file), files[0] if files else "unknown")


def _cuda(module: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    """Whether MPI takes CUDA buffers, how mpiplus therefore moves CUDA tensors, and why we think so."""
    support = cuda_aware.support_of(module, environment)
    try:
        direct, why = cuda_aware.path(support, *cuda_aware.wish(None, environment))
    except ValueError as error:
        direct, why = False, str(error)
    path = "handed to MPI, if a test at the start agrees" if direct else "staged through host memory"
    return {"aware": support.aware, "why": support.why, "path": path, "path_why": why}
