"""The limits of open files and connections of a process. Imports neither torch nor MPI."""

from __future__ import annotations

import resource

#: Beside the connections that a process expects: libraries, devices, pipes, MPI's own.
_OTHERS = 256
#: With fewer MPI may not even start.
_FEW = 64


def allow(connections: int) -> None:
    """As far as the system lets us: 1,024 in all is a usual limit, and a small one for a large job."""
    count = connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def scarcity() -> str:
    """Return a warning before MPI starts, which may end the process without saying who it is; empty: enough."""
    allow(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    why = f"only {most} files may be open (`ulimit -n`): too few for MPI or the job's store; allow {_FEW} or more"
    return why if 0 <= most < _FEW else ""  # RLIM_INFINITY is negative
