"""Files for the ranks' output with ``mpiplus run --log-dir``, and the ranks whose output is shown."""

from __future__ import annotations

from typing import Any

import click

_RANK = "attempt_{attempt}/{rank}"
SHOWN_LAYOUT = "attempt_0/RANK/stdout.log, stderr.log, error.json"


def parse_ranks(_: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    """``0,1``."""
    words = value.split(",") if value is not None else []
    if not all(word.strip().isdecimal() for word in words):
        raise click.BadParameter(f"{value!r} is no list of ranks, such as 0,1", param=option)
    return [int(word) for word in words] or None


def files_of(log_dir: str | None, stdout: str | None, stderr: str | None) -> dict[str, Any]:
    """FORMATs of each rank's files: torchrun's layout below ``log_dir``; what is named for a stream counts instead."""
    if log_dir is None:
        return {"stdout": stdout, "stderr": stderr, "error_file": None}
    below = f"{log_dir.replace('{', '{{').replace('}', '}}')}/{_RANK}"
    stdout, stderr = stdout or f"{below}/stdout.log", stderr or f"{below}/stderr.log"
    return {"stdout": stdout, "stderr": stderr, "error_file": f"{below}/error.json"}
