"""The MPI library: what is said where there is none; MPI_Init under Slurm's PMI-2 gets memory of zeros."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from torchmpi_plugin.mpi import library as mpi_library
from torchmpi_plugin.mpi import pmi


def test_a_file_that_is_no_library() -> None:
    with pytest.raises(OSError, match=r"ELF|header|file too short"):
        mpi_library.open_alias("libmpi.so.12", __file__)


def test_the_library_beside_the_launcher_is_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where only the bin directory of an MPI is on the path."""
    for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"):
        monkeypatch.delenv(name, raising=False)
    file = "lib64/libmpi.so.12"
    for directory in ("bin", "lib64"):
        (tmp_path / directory).mkdir()
    (tmp_path / "bin" / "mpiexec").touch(0o755)
    (tmp_path / file).touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert f"export MPI4PY_LIBMPI={tmp_path / file}." in mpi_library._not_found(["cannot load MPI library"])


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
