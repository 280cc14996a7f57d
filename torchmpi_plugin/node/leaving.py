"""A rank's word to its supervisor that it leaves, before the other ranks can notice.

Which rank failed first is not which one's process ended first: the others may see that it is leaving, fail because of
that, and be gone while it still closes its files.
"""

from __future__ import annotations

import contextlib
import os

from .. import settings


def tell(code: int) -> None:
    """This process, a rank under ``mpiplus run``, is about to leave; the first word counts.

    Args:
        code: the exit code; 0: it is not known yet, as after ``raise SystemExit(3)``.
    """
    descriptor = os.environ.pop(settings.LEAVING, "")
    if descriptor.isdigit():
        with contextlib.suppress(OSError):  # a program that has closed all descriptors, or its supervisor is gone
            os.write(int(descriptor), bytes([code & 0xFF]))
            os.close(int(descriptor))
