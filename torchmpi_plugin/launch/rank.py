"""The program of a rank that ``launch_subprocesses`` has started."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import NoReturn

from ..errors import RankFailedError
from ..jobs.guard import attachment
from ..mpi import runtime
from .payload import Payload

INTERRUPTED = 130
# How long ranks that were told of a failure wait for the one that failed to end first, and to be named for it.
_FAILED_SECONDS = 2.0


def _receive() -> Payload:
    """Rank 0 has it from the launcher, the others from rank 0."""
    comm = runtime.mpi().COMM_WORLD.Dup()
    data = comm.bcast(attachment() if comm.Get_rank() == 0 else None)
    comm.Free()
    return Payload.loads(data)


def exit_code(error: BaseException) -> int:
    """The exit code of a rank that has raised this, as the shell has it."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _was_told(error: BaseException) -> bool:
    """Return whether another rank has failed, and not this one."""
    if not isinstance(error, RankFailedError) or not error.ranks:
        return False
    return runtime.mpi().COMM_WORLD.Get_rank() not in error.ranks


def _say(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)


def _leave(code: int) -> NoReturn:
    """End at once: an orderly end would wait in MPI for ranks that wait for this one."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    """Receive the function, and run it."""
    try:
        _receive().run()
    except BaseException as error:
        code = exit_code(error)
        if code == 0:
            return
        if _was_told(error):
            time.sleep(_FAILED_SECONDS)
        _say(error)
        _leave(code)
