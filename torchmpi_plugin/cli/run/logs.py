"""Files for the ranks' output with ``mpiplus run --log-dir``, and the ranks whose output is shown."""

from __future__ import annotations

from typing import NamedTuple

import click

_RANK = "attempt_{attempt}/{rank}"
SHOWN_LAYOUT = "attempt_0/RANK/stdout.log, stderr.log, error.json"


class Files(NamedTuple):
    """Each rank's files, as FORMATs."""

    stdout: str | None
    stderr: str | None
    error_file: str | None


def parse_ranks(_: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    """``0,1``."""
    words = value.split(",") if value is not None else []
    if not all(word.strip().isdigit() for word in words):
        raise click.BadParameter(f"{value!r} is no list of ranks, such as 0,1", param=option)
    return [int(word) for word in words] or None


def files_of(log_dir: str | None, stdout: str | None, stderr: str | None) -> Files:
    """torchrun's layout below ``log_dir``; what is named for one stream counts instead."""
    if log_dir is None:
        return Files(stdout, stderr, None)
    below = f"{log_dir.replace('{', '{{').replace('}', '}}')}/{_RANK}"
    return Files(stdout or f"{below}/stdout.log", stderr or f"{below}/stderr.log", f"{below}/error.json")
