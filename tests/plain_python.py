"""Programs in a Python of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

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
