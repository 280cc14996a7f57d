"""What the launcher tells every rank's supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Orders(NamedTuple):
    """What every rank is told."""

    command: Sequence[str]
    cwd: str
    stdout: str | None
    stderr: str | None
    grace: float
    inherited: Mapping[str, str]
    own: Mapping[str, str]
    wants_master: Sequence[str] = ()
    attempt: int = 0
    error_file: str | None = None
    shown_local_ranks: Sequence[int] | None = None
