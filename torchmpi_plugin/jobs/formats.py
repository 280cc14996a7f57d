"""File names per rank: ``logs/{rank}.txt``."""

from __future__ import annotations

import string
from collections.abc import Mapping

FIELDS = ("rank", "local_rank", "world_size", "node_rank", "local_world_size", "attempt")


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
