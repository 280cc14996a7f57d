"""Lets a rank that a template has forked end in less time: what it has from the template goes with the process.

Python's end and that of torch's C++ take 0.2 s of computing, which would copy most of the template's memory: modules
are emptied, operators deregistered one by one. All that is of the rank ends as in a fresh process: its threads, its
exit handlers, its own modules and those of the package, MPI. But destructors of shared libraries (ELF's) are not run.
"""

from __future__ import annotations

import atexit
import ctypes
import sys

libc = ctypes.CDLL(None)
#: Modules that a rank leaves to the kernel.
_left: list[str] = []


def register() -> None:
    """To be called before all imports: the handler that is registered first, runs last."""
    atexit.register(_leave_modules)


def note_modules() -> None:
    """To be called when all is imported. Python's own modules and the package's end as always."""
    others = {"torchmpi_plugin", "mpi4py", "__main__", *sys.stdlib_module_names}
    _left.extend(name for name in sys.modules if name.partition(".")[0] not in others)


def leave_libraries() -> None:
    """To be called in the rank: handlers of C that it registers from now on run, those of the template do not."""
    libc.on_exit(libc._exit, None)  # called with the exit code
    libc.on_exit(libc.fcloseall, None)


def _leave_modules() -> None:
    for name in _left:
        if module := sys.modules.pop(name, None):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    for name, module in list(sys.modules.items()):
        if name.startswith("torchmpi_plugin._"):
            _count_its_lines(getattr(module, "__file__", "") or "")


def _count_its_lines(file: str) -> None:
    """gcov writes down what ran at the end of C++; c_src/build_shim.py."""
    if file.endswith(".so") and (dump := getattr(ctypes.CDLL(file), "__gcov_dump", None)):
        libc.on_exit(dump, None)
