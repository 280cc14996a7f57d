"""A shared library under a second name, for what asks the dynamic linker for it by that name.

The linker goes by the name that a library carries inside itself (DT_SONAME): neither a symbolic link nor an earlier
dlopen of the file helps. So a second library is made, of some 500 bytes and without code, which carries the name that
is asked for and has the real one as its only dependency.
"""

from __future__ import annotations

import ctypes
import os
import struct

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
