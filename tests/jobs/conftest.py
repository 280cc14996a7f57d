"""Every test of a job has one."""

from __future__ import annotations

import pytest
from job_runs import Job
from mpi_installations import Installation


@pytest.fixture
def job(installation: Installation, tmp_path, monkeypatch) -> Job:
    """Runs scripts under an MPI; each test's files are in a directory of its own."""
    # Open MPI too: what an mpirun that is killed has left would end a later one that gets the same process number.
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path))
    return Job(installation, tmp_path)
