"""The texts and types of our errors, in one place.

Arguments that are wrong on this rank raise ``ValueError`` or ``TypeError`` before anything is sent, a call
that the state forbids raises ``RuntimeError``; whatever goes wrong between ranks raises
``torch.distributed.DistBackendError`` (a ``RuntimeError``).
"""

from __future__ import annotations

from torch.distributed import DistBackendError

__all__ = ["DistBackendError", "describe_ranks"]


def describe_ranks(ranks: list[int], limit: int = 16) -> str:
    """``rank 3`` or ``ranks 0, 2, 5``, cut after ``limit`` of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"ranks {shown}{more}"
