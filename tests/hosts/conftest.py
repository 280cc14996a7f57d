"""Every test on several nodes runs under each MPI of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi_installations import under_each_mpi
from network import Hosts, hosts, missing


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    under_each_mpi(metafunc)


@pytest.fixture
def two_hosts(tmp_path) -> Iterator[Hosts]:
    """Two nodes on one network."""
    if reason := missing():
        pytest.skip(f"no nodes can be made here: {reason}")
    with hosts(2, tmp_path) as made:
        yield made
