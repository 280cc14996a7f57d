"""Programs for `mpiplus run --max-restarts`: what fails in some attempts and not in others."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def meet() -> None:
    """All ranks have started MPI when this returns."""
    from mpi4py import MPI

    assert (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()) == (RANK, SIZE)
    MPI.COMM_WORLD.Barrier()


def fails(how: str, times: str) -> None:
    """The last rank, in the first attempts."""
    meet()
    print(f"attempt {ATTEMPT} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}", flush=True)
    meet()
    if int(times) > ATTEMPT and RANK == SIZE - 1:
        if how == "supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
        if how.isdigit():
            os._exit(int(how))
        if how == "sleeps":
            time.sleep(1000)
        os.kill(os.getpid(), signal.Signals[how])
    meet()
    print("at the end")


def waits() -> None:
    """Until it is told to end."""
    Path(f"waits-{ATTEMPT}-{RANK}").touch()
    time.sleep(1000)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
