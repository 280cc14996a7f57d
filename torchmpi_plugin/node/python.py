"""Processes of our own: this Python, this package, and nothing of the working directory."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])


def python_command(code: str, *arguments: str) -> list[str]:
    """The command line that runs ``code`` in this Python.

    Not with -m, nor with -c alone: both import from the working directory first, where a user may keep a json.py.
    """
    program = f"import sys; sys.path[:1] = []; sys.path.append({_ROOT!r}); {code.lstrip()}"
    return [sys.executable, "-c", program, *arguments]
