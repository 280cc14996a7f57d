#!/usr/bin/env python3
"""Print one interpreter for each other version of Python that this machine has and the package is for.

Looked for on the PATH and where pyenv and Debian put them; what is missing of 3.10 to 3.14 is said on stderr.

Usage: other_pythons.py pyproject.toml
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

NEWEST = 14
PROBE = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.executable)"


def candidates(version: str) -> Iterator[str]:
    yield from filter(None, [which(f"python{version}"), f"/usr/bin/python{version}"])
    yield from sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")), reverse=True)


def works(python: str, version: str) -> bool:
    try:
        done = subprocess.run([python, "-c", PROBE], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split()[0] == version


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    oldest = int(re.search(r'^requires-python = ">=3\.(\d+)"$', text, re.MULTILINE)[1])
    for minor in range(oldest, NEWEST + 1):
        version = f"3.{minor}"
        if sys.version_info[:2] == (3, minor):
            continue
        found = next((python for python in candidates(version) if works(python, version)), None)
        if found:
            print(found)
        else:
            print(f"no Python {version} here: not tried", file=sys.stderr)


if __name__ == "__main__":
    main()
