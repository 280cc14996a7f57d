"""The program that mpirun starts for each rank: a guard, and a supervisor that runs the user's program.

The guard is the process that mpirun knows. It does nothing but wait and pass signals on. The supervisor has left
mpirun's process group, so it outlives the SIGKILL with which mpirun ends a job, and can still read and send what
the program has printed and how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

from .. import settings
from ..node import node
from .signals import FORWARDED

_KILLED = 128


def attachment() -> bytes:
    """Return what :func:`.job.run_job` was given for rank 0, of which this is the program. It can be read once."""
    with open(int(os.environ.pop(settings.ATTACHMENT)), "rb") as file:
        return file.read()


def _guard(supervisor: int) -> int:
    """Pass signals on until the supervisor ends; its exit code."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(supervisor, number)
            os.kill(supervisor, signal.SIGCONT)  # one that was stopped is to hear it

    for number in FORWARDED:
        signal.signal(number, pass_on)
    _, status = os.waitpid(supervisor, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        node.kill_session(supervisor)  # somebody killed the supervisor; its program must not stay
    return code if code >= 0 else 128 - code


def main() -> None:
    """Be the guard, and its child the supervisor."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)  # a launcher may have been started with some of them ignored
    contact = json.loads(os.environ.pop(settings.JOB))  # from the launcher: where it listens
    guard_gone, keep = os.pipe()
    supervisor = os.fork()
    if supervisor:
        os.close(guard_gone)
        code = _guard(supervisor)
        # Open MPI tells the others of the death of a rank, without which MPI_Comm_shrink waits for it for ever, if its
        # process was killed; an exit code would be an end like any other.
        if code > _KILLED and contact["tells_of_deaths"]:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(code)
    os.close(keep)
    guard = os.getppid()
    os.setsid()
    from .supervisor import supervise  # what the guard needs nothing of

    sys.exit(supervise(contact, guard_gone, guard))
