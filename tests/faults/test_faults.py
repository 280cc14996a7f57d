"""Runs walk.py, on a shim of which each allocation and each call of MPI's can be made to fail."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from mpi_installations import Installation, run_limited
from rank_runs import no_mpi_message

sys.path.insert(0, str(Path(__file__).parent))

import build

WALK = Path(__file__).parent / "walk.py"
FULL = os.environ.get("MPIPLUS_TEST_FULL") == "1"
#: Quiet, it takes one of them; or fifty, in full.
SECONDS = 3600 if FULL else 600
#: What fails is ours: where both are at hand, each MPI has one of the ways.
SHARED_MEMORY_OF = {"Open MPI": "0", "MPICH": "1"}


@pytest.fixture(scope="module")
def shims(tmp_path_factory):
    """Builds of the shim by kind of handle, made when they are asked for."""
    made: dict[bool, Path] = {}

    def shim(handles_are_pointers: bool) -> Path:
        if handles_are_pointers not in made:
            folder = tmp_path_factory.mktemp("shim")
            made[handles_are_pointers] = build.build(folder, handles_are_pointers)
        return made[handles_are_pointers]

    return shim


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("shared_memory", ["1", "0"], ids=["shm", "mpi"])
def test_every_failure(installation: Installation | None, shared_memory: str, shims) -> None:
    if installation is None:
        pytest.fail(no_mpi_message(), pytrace=False)
    if not FULL and shared_memory != SHARED_MEMORY_OF.get(installation.vendor, shared_memory):
        pytest.skip("this way is another MPI's; MPIPLUS_TEST_FULL=1: both")
    environment = installation.full_environment()
    sizeof = "from mpi4py import MPI; print('size', MPI._sizeof(MPI.Comm))"
    _, said = run_limited([sys.executable, "-c", sizeof], environment, 60)
    folder = shims("size 8" in said)
    environment = {**environment, "PYTHONPATH": str(folder), "MPIPLUS_SHM": shared_memory}
    code, output = run_limited(installation.command(2, [str(WALK)]), environment, SECONDS, cwd=folder)
    # Not by its exit code: the ranks end without MPI_Finalize, as operations that failed on one rank are left in MPI.
    assert code is not None, f"it hangs:\n{output[-4000:]}"
    assert ", 0 problems" in output, output[-6000:]
    assert "Segmentation" not in output, output[-6000:]
