"""A rank's word to its supervisor that it leaves, before the other ranks can notice.

Which rank failed first is not which one's process ended first: the others may see that it is leaving, fail because of
that, and be gone while it still closes its files.
"""

from __future__ import annotations

import contextlib
import os

from .. import settings


def name_of(descriptor: int) -> str:
    """A pipe by its number and by what it is: the program may close it, and open something else by that number."""
    status = os.fstat(descriptor)
    return f"{descriptor} {status.st_dev} {status.st_ino}"


def tell(code: int) -> None:
    """This process, a rank under ``mpiplus run``, is about to leave; the first word counts.

    Args:
        code: the exit code; 0: it is not known yet, as after ``raise SystemExit(3)``.
    """
    name = os.environ.pop(settings.LEAVING, "")
    with contextlib.suppress(OSError, ValueError):  # a program that has closed all descriptors, or who hears it is gone
        descriptor = int(name.partition(" ")[0])
        if name_of(descriptor) == name:
            os.write(descriptor, bytes([code & 0xFF]))
            os.close(descriptor)
