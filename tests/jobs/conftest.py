"""Every test of a job runs under each MPI of this machine."""

from __future__ import annotations

import pytest
from job_runs import Job
from mpi_installations import Installation, under_each_mpi
from rank_runs import no_mpi_message


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    under_each_mpi(metafunc)


@pytest.fixture
def job(installation: Installation | None, tmp_path) -> Job:
    """Runs scripts under an MPI; each test's files are in a directory of its own."""
    if installation is None:
        pytest.fail(no_mpi_message(), pytrace=False)
    return Job(installation, tmp_path)
