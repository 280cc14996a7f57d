"""Names of things, and where messages go. Imports nothing of weight: ``import torch`` runs through it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger("torchmpi_plugin")

#: What users ask torch for.
BACKEND = "mpiplus"
#: Where pip installs it from, as long as its name is on no index and the repository has no public address.
SOURCE = "a checkout of mpiplus"
#: The library of CUDA's driver, loaded when the first CUDA tensor is communicated.
CUDA_DRIVER = "libcuda.so.1"

#: What an error says, at a deadline, of those that are to blame; mpiplus run says it again.
NOT_ARRIVED = "Not arrived: "


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``3 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_ranks(ranks: Sequence[int], limit: int = 16) -> str:
    """``rank 3`` or ``ranks 0, 2, 5``, cut after ``limit`` of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"ranks {shown}{more}"
