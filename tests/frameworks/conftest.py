"""Other people's code on mpiplus.

What they need is not among the requirements of the suite, so it is run by name only: pytest tests/frameworks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import Launchers


@pytest.fixture
def launchers(tmp_path: Path) -> Launchers:
    return Launchers(tmp_path)
