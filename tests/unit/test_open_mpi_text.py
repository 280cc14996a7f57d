"""What processes are told that Open MPI's launcher has not started."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from torchmpi_plugin.lifecycle import bootstrap


def test_a_worker_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher of ours can start what Ray starts."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    told = bootstrap._open_mpi_text("Open MPI 5.0.11", 2)
    assert "Ray starts its own workers" in told
    assert "MPICH" in told
    assert "mpirun" not in told
    assert "mpiplus run" not in told
