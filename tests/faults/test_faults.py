"""Runs walk.py, on a shim of which each allocation and each call of MPI's can be made to fail."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from mpi_installations import Installation, run_limited
from sampling import FULL, share

sys.path.insert(0, str(Path(__file__).parent))

import build

WALK = Path(__file__).parent / "walk.py"
#: Quiet, it takes one of them; or fifty, in full.
SECONDS = 3600 if FULL else 600
#: By way: hosts of the ranks, variables, and arguments of walk.py. Between hosts a sum of so many elements rides by
#: halves, and the other operations fly; an exchange's blocks take several chunks.
ACROSS = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")
WAYS = {
    "shm": (2, {"MPIPLUS_SHM": "1"}, ()),
    "mpi": (2, {"MPIPLUS_SHM": "0"}, ()),
    "hosts": (3, {"MPIPLUS_TEST_HOST_OF": "0,0,1"}, ("9000", *ACROSS)),
    "chunks": (3, {"MPIPLUS_TEST_HOST_OF": "0,0,1"}, ("40000", "all_to_all_single", "gather", "scatter")),
}
#: What fails is ours: each MPI has some of the ways, and a change tries one of the four.
WAYS_OF = {"Open MPI": ("mpi",), "MPICH": ("shm", "hosts", "chunks")}
CHOSEN = share("ways on which calls fail", list(WAYS), len(WAYS))


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
@pytest.mark.parametrize("way", WAYS)
def test_every_failure(installation: Installation, way: str, shims) -> None:
    if not FULL and (way not in CHOSEN or way not in WAYS_OF.get(installation.vendor, WAYS)):
        pytest.skip("another change or another MPI tries this way; MPIPLUS_TEST_FULL=1: all")
    environment = installation.full_environment()
    sizeof = "from mpi4py import MPI; print('size', MPI._sizeof(MPI.Comm))"
    _, said = run_limited([sys.executable, "-c", sizeof], environment, 60)
    folder = shims("size 8" in said)
    ranks, variables, arguments = WAYS[way]
    environment = {**environment, "PYTHONPATH": str(folder), **variables}
    code, output = run_limited(installation.command(ranks, [str(WALK), *arguments]), environment, SECONDS, cwd=folder)
    # Not by its exit code: the ranks end without MPI_Finalize, as operations that failed on one rank are left in MPI.
    assert code is not None, f"it hangs:\n{output[-4000:]}"
    assert ", 0 problems" in output, output[-6000:]
    assert "Segmentation" not in output, output[-6000:]
