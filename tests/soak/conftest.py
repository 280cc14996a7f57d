"""Every MPI of this machine, as for the tests of jobs."""

from __future__ import annotations

import pytest
from mpi_installations import under_each_mpi


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    under_each_mpi(metafunc)
