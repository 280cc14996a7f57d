"""Every test of a job runs under each MPI of this machine."""

from __future__ import annotations

import pytest
from job_runs import Job
from mpi_installations import Installation, find_installations


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "installation" not in metafunc.fixturenames:
        return
    installations, _ = find_installations()
    metafunc.parametrize(
        "installation",
        installations or [None],
        ids=[installation.name for installation in installations] or ["no-MPI"],
        scope="session",
    )


@pytest.fixture
def job(installation: Installation | None, tmp_path) -> Job:
    """Runs scripts under an MPI; each test's files are in a directory of its own."""
    if installation is None:
        _, rejected = find_installations()
        found = [f"  {launcher.mpiexec}: {launcher.reason}" for launcher in rejected]
        pytest.fail("\n".join(["no MPI runs here; launchers that were found:", *(found or ["  none"])]), pytrace=False)
    return Job(installation, tmp_path)
