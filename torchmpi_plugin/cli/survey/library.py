"""What the MPI library says of itself once it is initialised."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_ABIS = {"openmpi": "Open MPI's", "mpich": "MPICH's", "mpiabi": "the MPI-5 standard's"}
# Variables that switch support for GPU buffers on or off, by vendor.
_GPU_SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "I_MPI_OFFLOAD", "MV2_USE_CUDA")


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
        "cuda": _cuda(module.__file__, os.environ),
    }


def _path() -> str:
    """The file that this process has mapped."""
    with open("/proc/self/maps") as maps:
        files = sorted({line.split()[-1] for line in maps if "/libmpi" in line or "/libpmpi" in line})
    return next((file for file in files if "libmpi.so" in file or "libmpich" in file), files[0] if files else "unknown")


def _cuda(extension: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Whether MPI takes CUDA buffers, and why we think so."""
    switches = [f"{name}={environment[name]}" for name in _GPU_SWITCHES if name in environment]
    said = f"; {', '.join(switches)}" if switches else ""
    try:
        query = ctypes.CDLL(extension).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return {"aware": None, "why": f"the library has no MPIX_Query_cuda_support to ask{said}"}
    answer = int(query())
    return {"aware": bool(answer), "why": f"MPIX_Query_cuda_support() says {answer}{said}"}
