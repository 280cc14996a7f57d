"""Every test of a job has one."""

from __future__ import annotations

import pytest
from job_runs import Job
from mpi_installations import Installation


@pytest.fixture
def job(installation: Installation, tmp_path) -> Job:
    """Runs scripts under an MPI; each test's files are in a directory of its own."""
    return Job(installation, tmp_path)
