"""How many files and connections a process may have open. Imports neither torch nor MPI."""

from __future__ import annotations

import resource

#: Beside the connections that a process expects: libraries, devices, pipes, MPI's own.
_OTHERS = 256


def allow(connections: int) -> None:
    """As far as the system lets us: 1,024 in all is a usual limit, and a small one for a large job."""
    count = connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
