"""Every test of a job runs under each MPI of this machine."""

from __future__ import annotations

import pytest
from job_runs import Job
from mpi_installations import Installation, find_installations, under_each_mpi


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    under_each_mpi(metafunc)


@pytest.fixture
def job(installation: Installation | None, tmp_path) -> Job:
    """Runs scripts under an MPI; each test's files are in a directory of its own."""
    if installation is None:
        _, rejected = find_installations()
        found = [f"  {launcher.mpiexec}: {launcher.reason}" for launcher in rejected]
        pytest.fail("\n".join(["no MPI runs here; launchers that were found:", *(found or ["  none"])]), pytrace=False)
    return Job(installation, tmp_path)
