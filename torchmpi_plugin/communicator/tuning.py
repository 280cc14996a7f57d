"""The file in which ``mpiplus bench --tune`` says up to which sizes which of two ways was faster.

``auto`` follows it (the variable MPIPLUS_TUNING). One file is one measurement, on so many nodes, under one MPI. It
counts for groups on as many nodes under an MPI of that vendor, whatever its version and the ranks on each node; other
groups on several nodes are warned, and go by the usual rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..names import counted, log
from .choice import SELECTION

FORMAT, VERSION = "mpiplus tuning", 3
_HINT = f"write one with `mpiplus bench --tune`, or unset {settings.TUNING.name}"
_warned: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class Tuning:
    """The content of a tuning file."""

    #: by row of choice.SELECTION, the bytes of the longest call that goes the first of its two ways; 0: all go the
    #: second one, None: all the first one. A row that is not named has its usual limit.
    limits: Mapping[str, int | None]
    hosts: int  # on how many it was measured
    ranks_per_host: Sequence[int]  # on each of them
    mpi: str  # the vendor of the MPI library
    mpi_version: str  # its version, of which nothing depends
    ratio: float  # the geometric mean of the first ways' times, as multiples of the second ones'
    medians_us: Sequence[dict[str, Any]]  # each operation and size with both times in microseconds

    def text(self) -> str:
        # A line for each row: people read it.
        rows = ",\n".join(f"    {json.dumps(row)}" for row in self.medians_us)
        head = {"format": FORMAT, "version": VERSION, **asdict(self), "medians_us": []}
        return json.dumps(head, indent=2).replace('"medians_us": []', f'"medians_us": [\n{rows}\n  ]') + "\n"


def read(path: Path) -> Tuning:
    """Return the content of a file; a ValueError: it cannot be read, is no such file, or of another version."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise _wrong(path, "is no tuning file")
    if (version := found.pop("version", None)) == 2 and "own_up_to" in found:
        version, found["limits"] = VERSION, found.pop("own_up_to")  # as it was called until 0.2
    if version != VERSION:
        raise _wrong(path, f"is of version {version!r}, and this mpiplus reads {VERSION}")
    try:
        tuning = Tuning(**found)
    except TypeError:
        raise _wrong(path, f"must have {', '.join(Tuning.__dataclass_fields__)} and nothing else") from None
    if not isinstance(tuning.limits, dict) or not all(map(_is_limit, tuning.limits.items())):
        known = ", ".join(SELECTION)
        raise _wrong(path, f"has limits {tuning.limits!r}, which must have numbers of bytes, or null, for {known}")
    if type(tuning.hosts) is not int or tuning.hosts < 1:
        raise _wrong(path, f"has hosts {tuning.hosts!r}, which must be a number from 1 on")
    if not isinstance(tuning.mpi, str):
        raise _wrong(path, f"has mpi {tuning.mpi!r}, which must be the name of an MPI")
    return tuning


def _is_limit(item: tuple[str, Any]) -> bool:
    row, longest = item
    return row in SELECTION and (longest is None or (type(longest) is int and 0 <= longest < 1 << 62))


def _wrong(path: Path, what: str) -> ValueError:
    return ValueError(f"{settings.TUNING.name}: the file {str(path)!r} {what}. Correct the path, {_HINT}")


def limits(path: str, nodes: int, mpi: str) -> dict[str, int | None] | None:
    """Return the file's limits for a group on so many nodes under that MPI; None where it has none.

    On several nodes, where jobs are measured, with a warning; a job on several has groups on one.

    Raises:
        ValueError: as :func:`read` does.
    """
    tuning = read(Path(path))
    if (tuning.hosts, tuning.mpi) == (nodes, mpi):
        return {row: limit for row, limit in tuning.limits.items() if SELECTION[row].counts(nodes)}
    if nodes > 1 and (path, nodes) not in _warned:
        _warned.add((path, nodes))
        log.warning(
            "mpiplus: %s: %s was measured on %s under %s, and says nothing of a group on %d nodes under %s; %s",
            *(settings.TUNING.name, path, counted(tuning.hosts, "node"), tuning.mpi, nodes, mpi, _HINT),
        )
    return None
