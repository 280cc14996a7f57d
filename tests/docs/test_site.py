"""docs/batch/mpiplus.lua, on a prefix that is laid out as docs/site.md says: any Python runs the command from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from code_blocks import ROOT
from patience import patient

import torchmpi_plugin

MODULEFILE = ROOT / "docs" / "batch" / "mpiplus.lua"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """What pip install --no-deps --target leaves, without building it once more."""
    base, metadata = tmp_path / "prefix", next(Path(sysconfig.get_path("purelib")).glob("torchmpi_plugin-*.dist-info"))
    shutil.copytree(Path(torchmpi_plugin.__file__).parent, base / "torchmpi_plugin")
    shutil.copytree(metadata, base / metadata.name)
    (base / "bin").mkdir()
    shutil.copy(Path(sysconfig.get_path("scripts")) / "mpiplus", base / "bin")
    return base


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The directory of a user's Python, first on the path."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


def loaded(base: Path, path: str) -> dict[str, str]:
    """The environment after `module load mpiplus`, by the file's lines."""
    environment = {**os.environ, "PATH": path, "PYTHONPATH": ""}
    lines = re.compile(r'^prepend_path\("(\w+)", (?:pathJoin\()?base(?:, "(\w+)"\))?\)?$', re.M)
    for name, inner in lines.findall(MODULEFILE.read_text()):
        environment[name] = f"{base / inner}:{environment[name]}".rstrip(":")
    return environment


def test_the_module_s_command_runs_with_the_user_s_python(prefix: Path, python: Path, tmp_path: Path) -> None:
    environment = loaded(prefix, f"{python}:/usr/bin:/bin")
    code = "import sys, torchmpi_plugin as t; print(sys.executable, t.__file__, t.__version__)"
    version, said = torchmpi_plugin.__version__, {}
    for command in (["mpiplus", "--version"], ["python3", "-c", code]):
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=patient(60), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        said[command[0]] = done.stdout.split()
    assert said["mpiplus"][-1] == version
    assert said["python3"] == [sys.executable, str(prefix / "torchmpi_plugin" / "__init__.py"), version]


def test_the_command_names_no_python(prefix: Path) -> None:
    """What installs it is not what runs it."""
    assert (prefix / "bin" / "mpiplus").read_text() == (ROOT / "bin" / "mpiplus").read_text()
