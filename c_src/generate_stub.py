#!/usr/bin/env python3
"""Write torchmpi_plugin/_shim.pyi: the shim's functions as mypy shall see them, from the headers that cffi reads.

setup.py does it with each build; without one: python c_src/generate_stub.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from build_shim import declarations

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "torchmpi_plugin" / "_shim.pyi"
FUNCTION = re.compile(r"^([a-z][\w ]*?[ *]+)(mpp_\w+) ?\(([^;{]*)\);", re.MULTILINE)
ENUM = re.compile(r"\benum\b[^{;]*\{(.*?)\}", re.DOTALL)
HEAD = '''"""The modules _shim_int and _shim_ptr, for types only: written by c_src/generate_stub.py."""

from collections.abc import Sequence
from typing import Any

class CData:
    """A C value of cffi's: a pointer, an array or a struct."""

    def __getitem__(self, index: int) -> Any: ...
    def __setitem__(self, index: int, value: Any) -> None: ...
    def __getattr__(self, field: str) -> Any: ...
    def __setattr__(self, field: str, value: Any) -> None: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...

class FFI:
    """What is used of cffi."""

    NULL: CData
    errno: int
    def new(self, cdecl: str, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str, source: Any) -> CData: ...
    def string(self, cdata: CData) -> bytes: ...
    def from_buffer(self, python_buffer: Any, require_writable: bool = ...) -> CData: ...
    def release(self, cdata: CData) -> None: ...

class Lib:
    """The functions and constants of reduce.h and shim.h."""

'''


def python_type(c: str, is_result: bool) -> str:
    """The annotation of a C type."""
    words = re.findall(r"\w+", c)
    if "*" in c:
        if is_result or "const" not in words:
            return "CData"
        if "char" in words:
            return "bytes | CData"
        return "CData" if words[-1].startswith("mpp_") else "CData | Sequence[Any]"
    if words == ["void"]:
        return "None"
    if words[-1].startswith("mpp_"):
        return "CData"
    return "float" if words[-1] in ("double", "float") else "int"


def parameters(text: str) -> Iterator[str]:
    for parameter in " ".join(text.split()).split(","):
        if parameter.strip() in ("", "void"):
            continue
        c, name = re.fullmatch(r"\s*(.*?[ *])(\w+)", parameter).groups()
        yield f"{name if name not in ('in', 'from') else name + '_'}: {python_type(c, False)}"


def stub() -> str:
    text = declarations()
    lines = []
    for body in ENUM.findall(text):
        names = [name.partition("=")[0].strip() for name in body.split(",")]
        lines += [f"    {name}: int" for name in names if name]
    for result, name, arguments in FUNCTION.findall(text):
        # cffi takes arguments by their places only
        given = ", ".join(["self", *parameters(arguments)])
        line = f"    def {name}({given}, /) -> {python_type(result, True)}: ..."
        lines.append(line)
    return HEAD + "\n".join(lines) + "\n"


def write() -> None:
    OUT.write_text(stub())


if __name__ == "__main__":
    write()
