"""Objects that the bridge makes are given back once, on every way, and not used after that; it is one per process."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from mpi_installations import find_installations, launch_command, run_limited
from plain_python import printed

from torchmpi_plugin import torch_internals

SCRIPT = Path(__file__).parent / "scripts" / "references.py"
#: A debug build of this Python (Debian: python3.11-dbg), which loads what is compiled for the usual one.
DEBUG_BUILD = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}-dbg")


@pytest.mark.skipif(torch_internals.tensor_exchange() is None, reason="this torch does not show its tensors to C")
@pytest.mark.parametrize("python", [[sys.executable, "-X", "dev"], [DEBUG_BUILD]], ids=["allocator", "build"])
def test_nothing_is_left_behind_or_used_too_long(python: list[str | None]) -> None:
    if python[0] is None:
        pytest.skip("needs a debug build of Python")
    mpi = find_installations()[0][0]
    # the debug build reads no .pth files of this environment: an editable installation is named as well
    path = [str(Path(torch_internals.__file__).parents[1]), *filter(None, sys.path)]
    packages = {"PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore"}
    # mpi4py looks for MPI beside the Python that runs, and the debug build is not this environment's
    packages["MPI4PY_LIBMPI"] = mpi.library
    *command, _ = launch_command(mpi.mpiexec, mpi.vendor, 1, [], "python")
    command += [*map(str, python), str(SCRIPT)]
    code, output = run_limited(command, {**mpi.full_environment(), **packages}, 250)
    assert code == 0 and "left behind: {}" in output, output[-3000:]


def test_the_compiled_part_refuses_a_subinterpreter() -> None:
    program = """
        try:
            import _interpreters as interpreters  # from Python 3.13 on
        except ImportError:
            import _xxsubinterpreters as interpreters
        text = "import sys; sys.modules['torchmpi_plugin'] = type(sys)('torchmpi_plugin');"
        text += "sys.modules['torchmpi_plugin'].__path__ = %r; import torchmpi_plugin._bridge"
        from importlib.util import find_spec
        path = find_spec("torchmpi_plugin").submodule_search_locations
        raised = None
        try:
            raised = interpreters.run_string(interpreters.create(), text % list(path))
        except Exception as error:
            raised = error
        print(raised)
    """
    told = printed(program)
    assert "ImportError" in told and ("main interpreter" in told or "subinterpreters" in told)
