"""A long run of random programs. MPIPLUS_TEST_SOAK=1800 asks for half an hour under each MPI; -s shows the counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mpi_installations import Installation, run_limited

SECONDS = float(os.environ.get("MPIPLUS_TEST_SOAK", "0"))
PROGRAMS = Path(__file__).parent / "programs.py"


@pytest.mark.skipif(not SECONDS, reason="MPIPLUS_TEST_SOAK=1800 asks for half an hour")
@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("collectives", ["auto", "mpi-only"], ids=["shm", "mpi"])
def test_soak(installation: Installation, ranks: int, collectives: str) -> None:
    """A quarter of the time each: over shared memory and over MPI's own collectives, on two and three ranks."""
    seed = os.environ.get("MPIPLUS_TEST_SOAK_SEED", str(os.getpid()))
    command = installation.command(ranks, [str(PROGRAMS), str(SECONDS / 4), seed])
    environment = {**installation.full_environment(), "MPIPLUS_COLLECTIVES": collectives}
    code, output = run_limited(command, environment, SECONDS + 300)
    print(output[-2000:])
    assert code == 0, f"seed {seed}: {'it hangs' if code is None else f'exit code {code}'}\n{output[-6000:]}"
    assert ", 0 problems" in output
