"""The MPI library, also under another name than mpi4py asks for; MPI_Init under Slurm's PMI-2 gets memory of zeros."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from plain_python import printed

from torchmpi_plugin.mpi import library as mpi_library
from torchmpi_plugin.mpi import pmi

OPEN = """
import ctypes, sys
from torchmpi_plugin.mpi.library import open_alias
client, name, library = sys.argv[1:]
try:
    ctypes.CDLL(client)
    sys.exit("the client needs no alias")
except OSError as error:
    assert name in str(error), error
open_alias(name, library)
print(ctypes.CDLL(client).client_answer())
"""


def compiled(directory: Path, name: str, soname: str, code: str, *more: str) -> Path:
    """A shared library with a name of its own inside."""
    source, library = directory / f"{name}.c", directory / name
    source.write_text(code)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", str(source), "-o", str(library), *more]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_under_a_second_name(tmp_path: Path) -> None:
    """As with Debian's MPICH: what is asked for is nowhere, and the library calls itself something else."""
    answer = "int answer(void) { return 42; }"
    asked = compiled(tmp_path, "libasked.so.12", "libasked.so.12", answer)
    code = "int answer(void); int client_answer(void) { return answer(); }"
    client = compiled(tmp_path, "client.so", "client.so", code, str(asked))
    asked.unlink()
    real = compiled(tmp_path, "libreal.so.3", "libreal.so.3", answer)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / asked.name).symlink_to(real)  # which does not help by itself
    assert printed(OPEN, client, asked.name, tmp_path / "link" / asked.name) == "42\n"


def test_a_file_that_is_no_library() -> None:
    with pytest.raises(OSError, match=r"ELF|header|file too short"):
        mpi_library.open_alias("libmpi.so.12", __file__)


@pytest.mark.parametrize("extension", ["MPI.mpich.cpython-311.so", "MPI.cpython-311.so"])
def test_the_library_beside_the_launcher_is_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extension: str
) -> None:
    """Where only the bin directory of an MPI is on the path. An mpi4py that was built for one MPI is linked to it."""
    for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"):
        monkeypatch.delenv(name, raising=False)
    file = "lib64/libmpi.so.12"
    for directory in ("bin", "lib64"):
        (tmp_path / directory).mkdir()
    (tmp_path / "bin" / "mpiexec").touch(0o755)
    (tmp_path / file).touch()
    (tmp_path / extension).touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("mpi4py.__path__", [str(tmp_path)])
    cure = f"LD_LIBRARY_PATH={tmp_path / 'lib64'}." if "mpich" not in extension else f"MPI4PY_LIBMPI={tmp_path / file}."
    reasons = ["cannot load", "/lib/libmpi.so: file too short", "libucp.so.0: failed to map segment"]
    said = mpi_library._not_found([*reasons, "libmpi.so.40: cannot open shared object file: No such file or directory"])
    assert "says: cannot load; libucp.so.0: failed to map segment. " in said
    assert f"export {cure}" in said


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    ("file", "version", "abi"), [("MPI.mpich.so", -1, "mpich"), ("MPI.so", -1, ""), ("MPI.so", 1, "mpiabi")]
)
def test_whose_abi_it_has(tmp_path: Path, file: str, version: int, abi: str) -> None:
    """mpi4py's wheels have it in the names of their extensions; one that was built need not, for the standard's."""
    module = SimpleNamespace(__file__=str(compiled(tmp_path, file, file, "void MPI_Get_version(void) {}")))
    module.get_vendor, module.Get_library_version = lambda: ("MPICH", (5, 0, 2)), str
    module.Get_abi_version = lambda: (version, 0)
    assert mpi_library.describe(module).abi == abi


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
        monkeypatch.setenv(name, value)
    if missing:
        monkeypatch.delenv(missing)
    with pmi.memory_of_zeros():
        assert (set(used_again(libc)) == {0}) == (missing is None)
    assert set(used_again(libc)) != {0}
