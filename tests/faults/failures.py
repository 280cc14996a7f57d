"""What fails, and how the ranks compare notes of what came of it."""

from __future__ import annotations

import ctypes
import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from torchmpi_plugin.mpi import runtime

TIMEOUT = timedelta(seconds=1)
ALLOCATION, CALL_OF_MPI = 0, 1
KINDS = {ALLOCATION: "allocation", CALL_OF_MPI: "call of MPI"}
MOST = 60
LONGEST = 60.0
#: What a failure may look like to the user; a DistBackendError is a RuntimeError.
ERRORS = (RuntimeError, MemoryError)
#: The ranks' ways to compare notes, past the backend under test.
notes = MPI.COMM_WORLD.Dup()
ME = notes.Get_rank()
problems: list[str] = []
counts = {"cases": 0, "failures": 0, "groups": 0}


def problem(text: str) -> None:
    problems.append(text)
    print(f"rank {ME}: {text[:600]}", flush=True)


def outcome_of(what: str, job: Callable[[], Any]) -> str:
    """What came of it: "right" or an error's name. Wrong results are noted."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)  # a hang ends the run, and says where
    try:
        found = job()
    except ERRORS as error:
        return type(error).__name__
    if found:
        problem(f"{what}: {found}")
    return "right"


def works(group: Any, what: str) -> str:
    """An all_reduce: whether it is right, or how it failed."""

    def check() -> str:
        tensor = torch.full((5,), ME + 1.0)
        dist.all_reduce(tensor, group=group)
        size = dist.get_world_size()
        return "" if tensor.tolist() == [size * (size + 1) / 2] * 5 else f"the next all_reduce gave {tensor.tolist()}"

    return outcome_of(what, check)


class Faults:
    """The counters in the shim."""

    def __init__(self) -> None:
        runtime.mpi()
        name = "_shim_ptr" if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p) else "_shim_int"
        self.lib = ctypes.CDLL(sys.modules[f"torchmpi_plugin.{name}"].__file__)
        self.lib.faults_happened.restype = self.lib.faults_sites.restype = ctypes.c_long

    @contextmanager
    def armed(self, kind: int, number: int, site: int = 0) -> Iterator[Faults]:
        self.lib.faults_arm(kind, ctypes.c_long(number), ctypes.c_void_p(site), int(MPI.ERR_OTHER))
        try:
            yield self
        finally:
            self.happened = bool(self.lib.faults_happened())
            self.sites = {kind: self._sites(kind) for kind in KINDS}
            self.lib.faults_arm(kind, ctypes.c_long(0), None, 0)

    def _sites(self, kind: int) -> list[int]:
        found = (ctypes.c_void_p * 4096)()
        return [site or 0 for site in found[: self.lib.faults_sites(kind, found)]]

    #: Where calls came from while it was last armed.
    sites: dict[int, list[int]]
    happened = False
