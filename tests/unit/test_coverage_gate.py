"""What CI measures of the package, and that less than before fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchmpi_plugin

coverage = pytest.importorskip("coverage", reason="stage tests of .ci/run brings it")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT / '.ci')!r}); import measured_process; "
WITH_PACKAGE = PROGRAM + "import torchmpi_plugin.names"
NAMES = str(Path(torchmpi_plugin.__file__).with_name("names.py"))


def run(program: str, folder: Path, **variables: str) -> None:
    """A process that is told to leave what it ran in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(variables, MPIPLUS_TEST_COVERAGE=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_a_process_with_the_package_is_measured(ranks: str, tmp_path) -> None:
    run(WITH_PACKAGE, tmp_path, OMPI_COMM_WORLD_SIZE=ranks)
    (file,) = tmp_path.iterdir()
    data = coverage.CoverageData(str(file))
    data.read()
    assert NAMES in data.measured_files()
    assert data.has_arcs()  # branches
    assert data.arcs(NAMES)


@pytest.mark.parametrize(
    ("program", "variables"),
    [(PROGRAM, {}), (WITH_PACKAGE, {"OMPI_COMM_WORLD_SIZE": "4"}), (WITH_PACKAGE, {"PYTHONPATH": "/nowhere"})],
    ids=["without the package", "four ranks", "another package"],
)
def test_others_are_not(program: str, variables: dict[str, str], tmp_path) -> None:
    run(program, tmp_path, **variables)
    assert list(tmp_path.iterdir()) == []


def test_the_readme_has_the_figures() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    python = re.search(r"^fail_under = (\S+)$", pyproject, re.M)[1]
    c = re.search(r'^fail-under-line = "(\S+)"$', pyproject, re.M)[1]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{python} % of the Python lines and branches, and {c} % of the C lines" in readme
