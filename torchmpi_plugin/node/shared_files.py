"""Files in memory that one process of a node opens and others map: they have no name, and go with their last user.

Others open them as ``/proc/PID/fd/N``, which the kernel lets processes of the same user do.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple


class Share(NamedTuple):
    """A file that others map: its descriptor in its owner, to tell it by, and its length."""

    descriptor: int
    device: int
    inode: int
    length: int


def share(descriptor: int, length: int) -> Share:
    """This process's file, for others."""
    status = os.fstat(descriptor)
    return Share(descriptor, status.st_dev, status.st_ino, length)


def open_share(pid: int, offered: Share) -> int:
    """A descriptor of the file that another process has open.

    Raises:
        OSError: it cannot be seen, or may not be opened, from here.
    """
    path = f"/proc/{pid}/fd/{offered.descriptor}"
    # One node by name need not mean one table of processes: containers may each have their own, where the path leads
    # to another file, or to none. MPI's copies between processes go by these numbers too.
    found = os.stat(path) if os.path.exists(path) else None
    if found is None or (found.st_dev, found.st_ino) != (offered.device, offered.inode):
        reason = "not the file of that rank: its container has process numbers of its own, with which MPI may crash too"
        raise FileNotFoundError(errno.ENOENT, reason, path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
