"""A test whether the MPI library takes addresses in a CUDA device's memory, by its own word. Needs no torch.

A wrong yes ends in a crash of the job, so whoever acts on one tries it first (see :mod:`cuda_path`); a wrong no costs
speed only.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import settings

# Libraries made with CUDA that leave it off until a variable says otherwise: (in the library's version, the variable).
_OFF_BY_DEFAULT = (("MVAPICH2", "MV2_USE_CUDA"), ("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED"))
# Variables that switch it off in libraries where it is on by default.
_SWITCHES = ("MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA", "I_MPI_OFFLOAD")
_OFF = ("0", "no", "off", "false", "disable")
_GPU_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH


class Support(NamedTuple):
    """``aware`` is None where the library cannot be asked."""

    aware: bool | None
    why: str


def support_of(module: Any, environment: Mapping[str, str]) -> Support:
    """Return whether the library behind an initialised ``mpi4py.MPI`` takes them: see :func:`detect`."""
    support = detect(ctypes.CDLL(module.__file__), str(module.Get_library_version()), environment)
    return unless_ucx_lacks_cuda(support, Path("/proc/self/maps").read_text()) if support.aware else support


def unless_ucx_lacks_cuda(support: Support, loaded: str) -> Support:
    """MPI has been built with CUDA, but the UCX that carries its messages need not have been, by what is loaded."""
    if "libucp" in loaded and "libuct_cuda" not in loaded:
        return Support(False, f"{support.why}, but UCX has not loaded its CUDA module (libuct_cuda)")
    return support


def detect(library: ctypes.CDLL, version: str, environment: Mapping[str, str]) -> Support:
    """Ask the library, through which MPI's functions are found: mpi4py's extension module."""
    for name in _SWITCHES:
        if environment.get(name, "").strip().lower() in _OFF:
            return Support(False, f"{name}={environment[name]}")
    for vendor, name in _OFF_BY_DEFAULT:
        if vendor in version.upper() and name not in environment:
            return Support(False, f"{vendor} wants {name}=1 for it")
    if re.match(r"MPICH Version:\s*3\.", version):
        return Support(False, "MPICH 3 ends the job when it is asked (MPIX_Query_cuda_support)")
    if (query := getattr(library, "MPIX_Query_cuda_support", None)) is not None:
        answer = int(query())
        return Support(answer == 1, f"MPIX_Query_cuda_support() says {answer}")
    if (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:  # MPICH, Cray MPICH
        has_cuda = ctypes.c_int(0)
        error = int(query(_GPU_CUDA, ctypes.byref(has_cuda)))
        return Support(not error and has_cuda.value == 1, f"MPIX_GPU_query_support(CUDA) says {has_cuda.value}")
    return Support(None, "the library has neither MPIX_Query_cuda_support nor MPIX_GPU_query_support to ask")


def asked_for(option: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the user's choice of :data:`settings.CUDA_PATHS`, and where that was made; a ValueError: it is none."""
    value, place = (option, "Options(cuda=...)") if option else (settings.CUDA.value(environment), settings.CUDA.name)
    return value, place if value != "auto" else ""


def path(support: Support, wanted: str, place: str) -> tuple[bool, str]:
    """Return whether MPI is to be handed CUDA tensors, and why; still to be tried if so."""
    if wanted != "auto":
        return wanted == "direct", f"{place} says {wanted}"
    if support.aware is None:
        return False, f"nobody says that MPI is CUDA-aware: {support.why}"
    return support.aware, support.why
