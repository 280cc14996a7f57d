"""Forks of a process in which MPI runs.

Imported with torch: mpi4py may start MPI, and the program fork, before anything else of mpiplus is imported.
"""

from __future__ import annotations

import os
import sys

#: True in a process forked from one in which MPI runs: MPI must not be touched there.
forked = False


def _after_fork_in_child() -> None:
    global forked  # noqa: PLW0603
    module = sys.modules.get("mpi4py.MPI")
    forked = forked or (module is not None and module.Is_initialized() and not module.Is_finalized())


os.register_at_fork(after_in_child=_after_fork_in_child)
