"""Message sizes as people write them: ``8``, ``64K``, ``16MiB``. All units are powers of 1024."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZE = re.compile(r"(\d+) ?([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes that ``text`` names.

    Raises:
        ValueError: ``text`` is no size, or it is zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size == 0:
        raise ValueError(f"{text!r} is not a size: write a number of bytes like 8, 64K or 16M")
    return size


def format_size(size: int) -> str:
    """Return ``size`` bytes in the largest unit that needs no fraction: ``8 B``, ``64 KiB``, ``16 MiB``."""
    for unit in "GMK":
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]} {unit}iB"
    return f"{size} B"


def fit_size(size: int, element: int, parts: int) -> int:
    """Return the number of bytes nearest above ``size`` that ``parts`` ranks share in whole elements."""
    share = element * parts
    return -(-size // share) * share
