"""Files per rank: names, as ``logs/{rank}.txt``, and the one into which torch's ``@record`` writes an exception."""

from __future__ import annotations

import contextlib
import json
import os
import string
from collections.abc import Mapping
from pathlib import Path

FIELDS = ("rank", "local_rank", "world_size", "node_rank", "local_world_size", "attempt")
#: Where torch's ``@record`` looks for the name of the file that it writes the exception to which ends the program.
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LARGEST = 1 << 20
_LONGEST = 2000  # of the message; its traceback is on stderr too


def torch_variables(fields: Mapping[str, int], nodes: int) -> dict[str, str]:
    """Return torchrun's variables of a rank with these fields, a job on so many nodes being one group."""
    values = {name: fields[name] for name in FIELDS if name != "attempt"}
    values |= {"group_rank": fields["node_rank"], "group_world_size": nodes}
    values |= {"role_rank": fields["rank"], "role_world_size": fields["world_size"]}
    return {name.upper(): str(value) for name, value in values.items()} | {"ROLE_NAME": "default"}


def check_format(format_: str, ranks: int) -> None:
    """See that a FORMAT gives each rank a file of its own.

    Raises:
        ValueError: an unknown field, a brace too many, or one name for several ranks.
    """
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(format_) if name is not None}
        if not (unknown := fields - {*FIELDS}):
            format_.format_map(dict.fromkeys(FIELDS, 0))
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{format_!r} is no file name with fields: {error}; the fields are {known}") from None
    if unknown:
        raise ValueError(f"{format_!r} has the unknown field {{{min(unknown)}}}; there are {known}")
    if ranks > 1 and not {"rank", "local_rank"} & fields:
        raise ValueError(f"{format_!r} is the same file for all {ranks} ranks; put {{rank}} into it")


def prepare_error_file(wanted: str) -> Path:
    """Return one rank's file for the program; none wanted: it is in memory, and leaves nothing behind."""
    if not wanted:
        return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('mpiplus-error')}")
    path = Path(wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an earlier job's
    return path


def error_message(path: Path) -> str:
    """Return what the program has written, as one line or few; empty: nothing, or nothing that is understood."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with path.open("rb") as file:
            written = json.loads(file.read(_LARGEST))["message"]
        return str(written["message"] if isinstance(written, dict) else written)[:_LONGEST]
    return ""
