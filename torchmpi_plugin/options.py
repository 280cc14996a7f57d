"""What a user may say about a group beyond torch's own arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Options:
    """Pass as ``pg_options`` of ``init_process_group``, or of ``new_group``.

    Attributes:
        comm: an ``mpi4py`` intracommunicator. The world then consists of its ranks; torch's ranks are
            its ranks unless the rendezvous says otherwise. It is duplicated, never used itself. For a subgroup it
            must have just the group's ranks.
        abort_on_exception: of the world: an exception that nobody catches on one rank ends the whole job, so that
            the others do not wait for it. The variable ``MPIPLUS_ABORT_ON_EXCEPTION=0`` switches this off as well.
        cuda: of the world: how CUDA tensors travel. "staged": through host memory; "direct": MPI is handed their
            addresses, except for reductions; None: as the variable ``MPIPLUS_CUDA`` says, or "auto", which asks the MPI
            library. The same on all ranks, or all stage.
    """

    comm: Any = None
    abort_on_exception: bool = True
    cuda: str | None = None
