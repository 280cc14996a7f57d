"""Other people's code on mpiplus.

What they need is not among the requirements of the suite, so it is run by name only: pytest tests/frameworks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import Launchers


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSpeed compiles for minutes: once for all tests."""
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture
def launchers(tmp_path: Path, compiled: Path) -> Launchers:
    return Launchers(tmp_path, compiled)
