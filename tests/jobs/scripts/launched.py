"""Programs for `mpiplus run`: the ways to go on and to end. None needs torch, so that they start fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LAST = SIZE - 1


def meet() -> None:
    """All ranks have started MPI when this returns."""
    from mpi4py import MPI

    assert (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()) == (RANK, SIZE)
    MPI.COMM_WORLD.Barrier()


def wait_for_ever() -> None:
    """In MPI, for a message that does not come; not in MPI_Recv, which takes a core from the other tests."""
    from mpi4py import MPI

    while not MPI.COMM_WORLD.Iprobe(source=MPI.ANY_SOURCE):
        time.sleep(0.01)


def hello(*words: str) -> None:
    """Who this is, and what it was given."""
    meet()
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS", "GREETING")
    print("hello", *words, *(os.environ.get(name) for name in names))
    print("to stderr", file=sys.stderr)
    os.write(1, "ümläut, and no end of line".encode())


def master() -> None:
    """Where other backends meet."""
    print("master", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])


def exits(code: str) -> None:
    """One rank ends with a code while the others sleep."""
    if RANK != LAST:
        time.sleep(100)
    print("the last words", file=sys.stderr)
    sys.exit(int(code))


def dies(how: str) -> None:
    """One rank ends while the others wait for it in MPI."""
    meet()
    if RANK != LAST:
        wait_for_ever()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "aborts":
        from mpi4py import MPI

        print("this is why", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(5)
    if how == "supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getppid(), signal.SIGSTOP)
    if how == "daemon":
        import psutil

        os.kill(psutil.Process().parents()[2].pid, signal.SIGKILL)  # of the guard, whose child is the supervisor
    if how == "left":
        os._exit(0)
    if how == "launcher":
        os.kill(int(Path("launcher").read_text()), signal.SIGKILL)
    wait_for_ever()


def one_goes_on() -> None:
    """One rank is killed, and another, which MPI lets go on, ends well later."""
    meet()
    if RANK == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    print("went on")
    os._exit(0)


def leaves_a_child() -> None:
    """One rank fails, each has a child that would run on, and SIGTERM is not listened to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    Path(f"started-{RANK}").touch()
    while not all(Path(f"started-{rank}").exists() for rank in range(SIZE)):
        time.sleep(0.01)
    if RANK == LAST:
        sys.exit(4)
    time.sleep(1000)


def signalled(name: str) -> None:
    """The launcher gets a signal, and each rank must get it once."""
    wanted, got = signal.Signals[name], []
    signal.signal(wanted, lambda number, _: got.append(number))
    Path(f"ready-{RANK}").touch()
    while not all(Path(f"ready-{rank}").exists() for rank in range(SIZE)):
        time.sleep(0.01)
    if RANK == 0:
        os.kill(int(Path("launcher").read_text()), wanted)
    until = time.monotonic() + 30
    while not got and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    print(f"got {name} {len(got)} time(s)")


def fails(how: str, times: str) -> None:
    """The last rank, in the first attempts."""
    meet()
    print(f"attempt {ATTEMPT} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}", flush=True)
    meet()
    if int(times) > ATTEMPT and RANK == LAST:
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


def sleeps() -> None:
    """Too long."""
    print("asleep")
    time.sleep(1000)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
