"""What processes are told that MPI's launcher has not started, where they cannot make a world."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from types import ModuleType

import pytest

from torchmpi_plugin.errors import DistBackendError
from torchmpi_plugin.lifecycle import bootstrap


def test_a_worker_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher of ours can start what Ray starts."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    told = bootstrap._open_mpi_text("Open MPI 5.0.11", 2)
    assert "Ray starts its own workers" in told
    assert "MPICH" in told
    assert "mpirun" not in told
    assert "mpiplus run" not in told


def test_a_server_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is told of its job."""

    class Ended(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, _: list[str], **how: object) -> None:
            super().__init__([sys.executable, "-c", ""], **how)  # type: ignore[call-overload]
            super().wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(DistBackendError, match="the server on rank 0 did not start"):
        bootstrap.serve(["a", "a"], timedelta(seconds=5))
