"""The search for MPI installations, against launchers that are not what they seem."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mpi_installations import Installation, Rejected, candidates, find_installations, probe

ENVIRONMENTS_MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.fixture
def launcher(tmp_path: Path):
    """Makes a launcher out of a few lines of shell."""

    def make(script: str, name: str = "mpiexec") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_another_mpis_launcher_is_rejected(launcher) -> None:
    """It starts the processes, but each is alone in its world: the library is not the launcher's."""
    foreign = launcher('shift 2\nfor rank in 0 1; do PMI_RANK= "$@" & done\nwait')
    answer = probe(foreign, {})
    assert isinstance(answer, Rejected)
    assert "2 ranks became 2 worlds of 1" in answer.reason


def test_a_broken_launcher_is_rejected_with_its_words(launcher) -> None:
    answer = probe(launcher("echo the licence has expired\nexit 3"), {})
    assert isinstance(answer, Rejected)
    assert "exit code 3: the licence has expired" in answer.reason


def test_this_environments_launcher_comes_first() -> None:
    if ENVIRONMENTS_MPIEXEC.exists():
        assert next(iter(candidates()))[0] == str(ENVIRONMENTS_MPIEXEC)
    installations, rejected = find_installations()
    assert installations, f"no MPI here: {rejected}"
    assert all(isinstance(found, Installation) and found.version for found in installations)
