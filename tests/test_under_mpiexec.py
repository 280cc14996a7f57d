"""Runs tests/mpi through mpiexec: every MPI of this machine, on up to 5 ranks, one launch each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mpi_installations import Installation, find_installations
from rank_runs import rank_arguments, run_ranks
from sampling import FULL, part_of_the_launch

RANKS = (1, 2, 3, 4, 5)
#: Two families share these: what differs between them shows on 2. MPIPLUS_TEST_FULL=1 asks for all.
RANKS_OF = {"Open MPI": (1, 2, 3, 5), "MPICH": (2, 4)}
#: Five ranks take 140 on two cores; rank_runs.SECONDS_PER_TEST ends those that hang.
SECONDS_PER_LAUNCH = 9000 if FULL else 1200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "installation" not in metafunc.fixturenames:
        return
    installations, _ = find_installations()
    on_two = pytest.mark.fresh("once for each MPI, ranks that share no hash seed and no addresses")
    pairs: list[Any] = [
        pytest.param(one, n, marks=[on_two] if n == 2 else [])
        for one in installations
        for n in (RANKS if FULL else RANKS_OF.get(one.vendor, RANKS))
    ]
    metafunc.parametrize(
        ("installation", "ranks"),
        pairs or [(None, 0)],
        ids=[f"{one.values[0].name}-{one.values[1]}ranks" for one in pairs] or ["no-MPI"],
    )


@pytest.mark.timeout(SECONDS_PER_LAUNCH + 60)
def test_under_mpiexec(
    installation: Installation, ranks: int, tmp_path: Path, request: pytest.FixtureRequest, record_property
) -> None:
    part = part_of_the_launch(request.config, ranks)
    command = installation.command(ranks, rank_arguments(tmp_path, request.config.option.mpi_keyword, part))
    passed = run_ranks(command, installation.full_environment(), tmp_path, ranks, SECONDS_PER_LAUNCH)
    record_property("tests_passed_on_each_rank", passed)


def test_every_system_mpi_can_be_used() -> None:
    """A launcher such as Debian's mpiexec.mpich names its MPI; left out, that MPI would go untested."""
    _, rejected = find_installations()
    assert [launcher for launcher in rejected if launcher.named_after_its_mpi] == []
