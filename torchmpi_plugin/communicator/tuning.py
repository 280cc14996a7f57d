"""The file in which ``mpiplus bench --tune`` says in which sizes whose collectives between nodes were faster.

``auto`` follows it (the variable MPIPLUS_TUNING). One file is one measurement, on so many nodes, under one MPI. It
counts for groups on as many nodes under an MPI of that vendor, whatever its version and the ranks on each node; others
are warned, and go by the usual rule.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import settings
from .choice import KINDS

log = logging.getLogger("torchmpi_plugin")

FORMAT, VERSION = "mpiplus tuning", 2
_HINT = f"write one with `mpiplus bench --tune`, or unset {settings.TUNING.name}"
_warned: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class Tuning:
    """The content of a tuning file."""

    #: by operation, the bytes of the longest call for which mpiplus's collectives are taken, MPI's for longer ones; 0:
    #: MPI's for all, None: mpiplus's for all, as for an operation that is not named
    own_up_to: Mapping[str, int | None]
    hosts: int  # on how many it was measured
    ranks_per_host: Sequence[int]  # on each of them
    mpi: str  # the vendor of the MPI library
    mpi_version: str  # its version, of which nothing depends
    ratio: float  # the geometric mean of the own collectives' times, as multiples of MPI's
    medians_us: Sequence[dict[str, Any]]  # each operation and size with both times in microseconds

    def text(self) -> str:
        """The content of the file."""
        # A line for each row: people read it.
        rows = ",\n".join(f"    {json.dumps(row)}" for row in self.medians_us)
        head = {"format": FORMAT, "version": VERSION, **asdict(self), "medians_us": []}
        return json.dumps(head, indent=2).replace('"medians_us": []', f'"medians_us": [\n{rows}\n  ]') + "\n"


def read(path: Path) -> Tuning:
    """Return the content of a file.

    Raises:
        ValueError: it cannot be read, or is not such a file, or one of another version.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise _wrong(path, "is no tuning file")
    if (version := found.pop("version", None)) != VERSION:
        raise _wrong(path, f"is of version {version!r}, and this mpiplus reads {VERSION}")
    try:
        tuning = Tuning(**found)
    except TypeError:
        raise _wrong(path, f"must have {', '.join(Tuning.__dataclass_fields__)} and nothing else") from None
    if not isinstance(tuning.own_up_to, dict) or not all(map(_is_limit, tuning.own_up_to.items())):
        known = ", ".join(KINDS)
        raise _wrong(
            path, f"has own_up_to {tuning.own_up_to!r}, which must have numbers of bytes, or null, for {known}"
        )
    if type(tuning.hosts) is not int or tuning.hosts < 2:
        raise _wrong(path, f"has hosts {tuning.hosts!r}, which must be a number from 2 on")
    if not isinstance(tuning.mpi, str):
        raise _wrong(path, f"has mpi {tuning.mpi!r}, which must be the name of an MPI")
    return tuning


def _is_limit(item: tuple[str, Any]) -> bool:
    operation, longest = item
    return operation in KINDS and (longest is None or (type(longest) is int and 0 <= longest < 1 << 62))


def _wrong(path: Path, what: str) -> ValueError:
    return ValueError(f"{settings.TUNING.name}: the file {str(path)!r} {what}. Correct the path, {_HINT}")


def own_up_to(path: str, nodes: int, mpi: str) -> dict[str, int] | None:
    """Return the file's limits for a group on so many nodes under that MPI; None, with a warning, where it has none.

    Returns:
        As ``choice.Choice`` has it.

    Raises:
        ValueError: as :func:`read` does.
    """
    tuning = read(Path(path))
    if (tuning.hosts, tuning.mpi) == (nodes, mpi):
        return {operation: longest for operation, longest in tuning.own_up_to.items() if longest is not None}
    if (path, nodes) not in _warned:
        _warned.add((path, nodes))
        log.warning(
            "mpiplus: %s: %s was measured on %d nodes under %s, and says nothing of a group on %d nodes under %s; %s",
            *(settings.TUNING.name, path, tuning.hosts, tuning.mpi, nodes, mpi, _HINT),
        )
    return None
