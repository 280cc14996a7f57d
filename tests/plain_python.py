"""Programs in a Python of their own, and modules of files that no import finds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from patience import patient


def python(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """What has come of the program, also where it has failed."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    variables = {**os.environ, **environment}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=patient(100), env=variables)


def printed(program: str, *arguments: object, **environment: str) -> str:
    """What the program prints; it must not fail."""
    done = python(program, *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module_of(file: Path | str, name: str = "") -> ModuleType:
    """Compiled ones have to have their ``name``."""
    specification = importlib.util.spec_from_file_location(name or Path(file).stem, file)
    assert specification is not None and specification.loader is not None
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
