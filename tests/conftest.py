"""What the whole suite shares: which tests run in this process, and which under mpiexec."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rank-reports",
        metavar="DIR",
        help="directory where each rank under mpiexec leaves its report (set by the driver)",
    )
    parser.addoption(
        "--mpi-keyword",
        metavar="EXPRESSION",
        default="",
        help="run only these tests of tests/mpi under mpiexec (as -k does in this process)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Plain pytest leaves tests/mpi to the driver; a rank under mpiexec leaves out the driver."""
    if config.getoption("--with-mpi"):
        return True if collection_path.name == "test_under_mpiexec.py" else None
    return True if collection_path == HERE / "mpi" else None
