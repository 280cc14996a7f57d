"""Every test on several nodes runs under each MPI of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi_installations import under_each_mpi
from network import Hosts, hosts, missing
from rank_runs import no_mpi_message


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    under_each_mpi(metafunc)


@pytest.fixture(autouse=True)
def mpi_is_there(request) -> None:
    if "installation" in request.fixturenames and request.getfixturevalue("installation") is None:
        pytest.fail(no_mpi_message(), pytrace=False)


@pytest.fixture
def nodes_can_be_made() -> None:
    if reason := missing():
        pytest.skip(f"no nodes can be made here: {reason}")


@pytest.fixture
def two_hosts(nodes_can_be_made, tmp_path) -> Iterator[Hosts]:
    """Two nodes on one network."""
    with hosts(2, tmp_path) as made:
        yield made


@pytest.fixture
def three_hosts(nodes_can_be_made, tmp_path) -> Iterator[Hosts]:
    with hosts(3, tmp_path) as made:
        yield made
