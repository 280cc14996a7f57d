"""One Slurm cluster for all tests here, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, missing, running


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
