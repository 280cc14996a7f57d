"""Starts a script on two ranks, under one MPI: that mpiplus works on each of them is for other tests to show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mpi_installations import find_installations
from patience import patient
from rank_runs import no_mpi_message

sys.path.append(str(Path(__file__).parents[1] / "jobs"))
from job_runs import Outcome, free_port, run_process

__all__ = ["Launchers", "Outcome"]

RANKS = 2
SECONDS = patient(240)


class Launchers:
    """Start a script on two ranks: mpirun, and torchrun for the same on gloo."""

    def __init__(self, directory: Path, compiled: Path) -> None:
        found, _ = find_installations()
        if not found:
            pytest.fail(no_mpi_message(), pytrace=False)
        self._installation = found[0]
        self._directory, self._compiled = directory, compiled

    def mpirun(self, script: Path, *arguments: str, **variables: str) -> Outcome:
        command = self._installation.command(RANKS, [str(script), *arguments])
        return run_process(command, self._environment(variables), self._directory, SECONDS)

    def torchrun(self, script: Path, *arguments: str) -> Outcome:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--master-port", str(free_port()), str(script), *arguments]
        return run_process(command, self._environment({}), self._directory, SECONDS)

    def alone(self, script: Path, *arguments: str) -> Outcome:
        """Under no launcher: for what starts its own processes."""
        return run_process([sys.executable, str(script), *arguments], self._environment({}), self._directory, SECONDS)

    @property
    def joins_processes(self) -> bool:
        """Whether this MPI makes a world of processes that its launcher has not started."""
        return self._installation.vendor == "MPICH"

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        # Each rank one thread; no tensor of a framework's goes anywhere; what DeepSpeed compiles stays here.
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": str(self._compiled)}
        return {**self._installation.full_environment(), **own, **variables}
