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
    """A descriptor of the file that another process has open; an OSError where it cannot be seen or opened."""
    path = f"/proc/{pid}/fd/{offered.descriptor}"
    # One node by name need not mean one table of processes: containers may each have their own, where the path leads
    # to another file, or to none.
    status = os.stat(path)
    if (status.st_dev, status.st_ino) != (offered.device, offered.inode):
        raise FileNotFoundError(errno.ENOENT, "a file of another process", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
