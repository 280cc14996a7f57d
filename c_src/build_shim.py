"""Build the shim twice from one source, once for each kind of MPI handle, and the bridge to it.

``_shim_int`` serves MPICH and its relatives (Intel MPI, Cray MPICH, MVAPICH), whose handles are 32-bit
integers; ``_shim_ptr`` serves Open MPI and the MPI-5 standard ABI, whose handles are pointers. Neither
needs an MPI installation to build: every MPI function is looked up at run time.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

from cffi import FFI
from setuptools import Extension

HERE = Path(__file__).parent
#: The folder of what knows Python, which is an extension of its own.
PYTHON = "python"


def _files(of_the_bridge: bool) -> tuple[str, ...]:
    found = sorted(file.relative_to(HERE) for file in HERE.glob("*/*.c"))
    return tuple(file.as_posix() for file in found if (file.parent.name == PYTHON) == of_the_bridge)


SOURCES, BRIDGE = _files(False), _files(True)
HEADERS = ("arith/reduce.h", "shim.h")
#: A change of any header compiles all again.
DEPENDS = sorted(f"c_src/{file.relative_to(HERE).as_posix()}" for file in HERE.rglob("*.[hd]*"))


def declarations() -> str:
    """The two public headers as the compiler sees them, but for what they include of the system's: cffi reads these."""
    text = "\n".join((HERE / header).read_text() for header in HEADERS)
    text = re.sub(r"^#include <.*>$", "", text, flags=re.MULTILINE)
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, "-E", "-P", f"-I{HERE}", "-xc", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.replace("; ", ";\n")


def _coverage_flags(name: str) -> list[str]:
    """Counters of the lines that run, where ``MPIPLUS_TEST_COVERAGE`` names a folder for gcov's files.

    A folder in it for each extension: they are made of the same files, and would overwrite each other's counts.
    """
    folder = os.environ.get("MPIPLUS_TEST_COVERAGE")
    if not folder:
        return []
    Path(folder, name).mkdir(parents=True, exist_ok=True)
    return ["--coverage", "-fprofile-update=atomic", "-dumpdir", f"{folder}/{name}/"]


def _compile_flags(name: str) -> list[str]:
    flags = ["-std=gnu11", "-O3", "-fvisibility=hidden", *_coverage_flags(name)]
    return flags + os.environ.get("MPIPLUS_CFLAGS", "").split()


def _link_flags() -> list[str]:
    # tests/fork_server/ending.py calls what writes the counts.
    counts = ["--coverage", "-Wl,-u,__gcov_dump"] if os.environ.get("MPIPLUS_TEST_COVERAGE") else []
    return counts + os.environ.get("MPIPLUS_LDFLAGS", "").split()


def bridge() -> Extension:
    """What Python calls in place of c10d's methods: on Python's stable ABI, without the headers of torch or of MPI."""
    return Extension(
        "torchmpi_plugin._bridge",
        [f"c_src/{source}" for source in BRIDGE],
        include_dirs=["c_src"],
        depends=DEPENDS,
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=_compile_flags("_bridge"),
        extra_link_args=_link_flags(),
        py_limited_api=True,
    )


def _builder(name: str, macros: list[tuple[str, str | None]]) -> FFI:
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source(
        f"torchmpi_plugin.{name}",
        '#include "shim.h"',
        # setuptools wants paths relative to setup.py
        sources=[f"c_src/{source}" for source in SOURCES],
        include_dirs=["c_src"],
        depends=DEPENDS,
        define_macros=macros,
        libraries=["dl", "pthread"],
        extra_compile_args=_compile_flags(name),
        extra_link_args=_link_flags(),
    )
    return ffi


shim_int = _builder("_shim_int", [])
shim_ptr = _builder("_shim_ptr", [("MPP_HANDLES_ARE_POINTERS", None)])
