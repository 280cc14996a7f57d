"""MPI_Init under Slurm's PMI-2 gets memory of zeros, and nothing else does."""

from __future__ import annotations

import ctypes

import pytest

from torchmpi_plugin.mpi import pmi

LENGTH = 60_000  # less than what malloc takes from the system for each call
OF_SLURM = {"PMI_FD": "5", "SLURM_PROCID": "0"}


@pytest.fixture
def libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        pytest.skip("not glibc")
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


def used_again(libc: ctypes.CDLL) -> bytes:
    """What lies in new memory, after as much has been written to and freed."""
    for content in (0x2A, None):
        addresses = [libc.malloc(LENGTH) for _ in range(4)]
        if content:
            for address in addresses:
                ctypes.memset(address, content, LENGTH)
        found = b"".join(ctypes.string_at(address, LENGTH) for address in addresses)
        for address in addresses:
            libc.free(address)
    return found


@pytest.mark.parametrize("missing", [None, "PMI_FD", "SLURM_PROCID"])
def test_memory(libc: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    for name, value in OF_SLURM.items():
        if name == missing:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pmi.memory_of_zeros():
        assert (set(used_again(libc)) == {0}) == (missing is None)
    assert set(used_again(libc)) != {0}
