"""Helpers for distributed programs, on any backend.

Composer's, Axolotl's and ml's names on one import.

They use torch's public interface only, so they work on any backend, and every one takes ``group=``. Ranks in
arguments are torch's global ranks, as in the originals. What differs from the originals, and why, is in
``docs/migrating-from-composer.md``, ``-axolotl.md`` and ``-ml.md``; examples of all are in ``docs/helpers.md``.

Uses ``launchers``, for what is known before initialisation, and torch. Start with ``queries.py``.
"""

from __future__ import annotations

from ..errors import RankFailedError
from .computing import (
    all_gather_object,
    broadcast_object_list,
    compute_and_broadcast,
    gather_from_all_ranks,
    gather_scalar_from_all_ranks,
    reduce_and_broadcast,
)
from .queries import (
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_sampler,
    get_world_size,
    is_available,
    is_distributed,
    is_initialized,
    is_main_process,
)
from .starting import initialize_dist
from .tensors import all_gather, all_reduce, all_to_all, broadcast
from .waiting import barrier, run_local_rank_zero_first, zero_first, zero_only

__all__ = [
    "RankFailedError",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "compute_and_broadcast",
    "gather_from_all_ranks",
    "gather_scalar_from_all_ranks",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_distributed",
    "is_initialized",
    "is_main_process",
    "reduce_and_broadcast",
    "run_local_rank_zero_first",
    "zero_first",
    "zero_only",
]
