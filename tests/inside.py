"""What tests read and set inside of a group: the one file that knows where it is (tests/unit/private_names.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from torchmpi_plugin.communicator.choice import SELECTION
from torchmpi_plugin.mpi import runtime

CPU = torch.device("cpu")


def calls(group: Any) -> Any:
    """The group's record of its calls in C: ``sequence``, ``messages``, ``in_c``, ``compares``, ``python_only``..."""
    return group._calls


def count_of(group: Any) -> int:
    """Of the operations begun in a group: C counts each just before it starts it."""
    return int(calls(group).sequence + calls(group).messages)


def broken(group: Any) -> str | None:
    """Why a group cannot be used any more."""
    reason: str | None = calls(group).broken
    return reason


def pending(group: Any) -> Any:
    """The operations that the engine keeps alive."""
    return group._engine._registry


def held(group: Any) -> tuple[int, int, int]:
    """Operations that are not complete, that the engine keeps, and that Python has not released."""
    lib, handle = group._lib, group.communicator.handle
    return lib.mpp_group_active(handle), len(pending(group)), lib.mpp_group_holders(handle) - 1


def let_mpi_reach_devices(groups: Iterable[Any], direct: bool = True) -> None:
    """As with a CUDA-aware MPI: it is handed the memory of devices."""
    for group in groups:
        group._direct = direct


def let_ranks_read_devices(group: Any) -> None:
    """Also of the shortest tensors that are only moved."""
    group._lib.mpp_group_limit(group._handle, group._lib.MPP_BUS, 0)


def sum_on_devices(monkeypatch: Any) -> None:
    """Also the shortest tensors, where ranks read each other's devices, or have slots that these reach."""
    for row in ("cuda_sums", "cuda_slot_sums"):
        monkeypatch.setitem(SELECTION, row, SELECTION[row]._replace(usual=0))


def stage_no_reductions(monkeypatch: Any) -> None:
    """Also the shortest ones of what MPI can reach are done on the device."""
    row = SELECTION["cuda_reductions"]
    monkeypatch.setitem(SELECTION, "cuda_reductions", row._replace(usual=0))


@contextmanager
def chunk_limit(limit: int) -> Iterator[None]:
    """Operations longer than ``limit`` bytes, a positive multiple of 64, are cut up, as they are above 1 GiB.

    The same on all ranks; no operation may be under way.
    """
    assert limit > 0 and limit % 64 == 0
    lib = runtime.shim().lib
    before = lib.mpp_get_chunk_limit()
    lib.mpp_set_chunk_limit(limit)
    try:
        yield
    finally:
        lib.mpp_set_chunk_limit(before)


@contextmanager
def through_python(group: Any, wanted: bool = True) -> Iterator[None]:
    """C leaves each call to Python."""
    before, calls(group).python_only = calls(group).python_only, wanted
    try:
        yield
    finally:
        calls(group).python_only = before


def set_timeout(group: Any, timeout: timedelta) -> None:
    """By the name that c10d has for it, which older versions have on the backend only."""
    owner = group if hasattr(group, "_set_default_timeout") else group._get_backend(CPU)
    owner._set_default_timeout(timeout)


def works_of(block: Any) -> list[Any]:
    """The Works of what was coalesced."""
    works: list[Any] = block._works
    return works


def probe(communicator: Any, seconds: float | None = None) -> str:
    """What is wrong with messages between devices, here in host memory; each waits for so long."""
    from torchmpi_plugin.communicator import cuda_path  # others come here before MPI is chosen

    usual = cuda_path._PROBE_SECONDS
    cuda_path._PROBE_SECONDS = usual if seconds is None else seconds
    try:
        return cuda_path._probe(communicator, CPU)
    finally:
        cuda_path._PROBE_SECONDS = usual
