"""The ways out of a program: orderly ones, and those that must end the whole job."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say, wait_for

from torchmpi_plugin.diagnosis import diagnosis, monitor

LAST = SIZE - 1


def start_everything() -> list:
    """Operations of each kind that complete by themselves."""
    works = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(3)]
    works += [dist.isend(torch.ones(1 << 16), (ME + 1) % SIZE), dist.irecv(torch.ones(1 << 16), (ME - 1) % SIZE)]
    works += [dist.barrier(async_op=True)]
    return works


def leave(how: str) -> None:
    """Orderly ends, after every kind of operation."""
    dist.init_process_group("mpiplus")
    group = dist.new_group()
    check_works(group)
    works = start_everything()
    if how in ("destroyed", "kept"):
        for work in works:
            work.wait()
    if how == "dropped":
        del works
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "kept":
        atexit.register(check_works)  # an exit handler of the program may still communicate


def leave_late(how: str) -> None:
    """Communicate in an exit handler that was registered first, so that it is called last."""
    if how == "handler":
        atexit.register(lambda: (check_works(), say("has communicated")))
    dist.init_process_group("mpiplus")
    check_works()
    if how == "daemon":
        threading.Thread(target=dist.recv, args=(torch.ones(3), (ME + 1) % SIZE), daemon=True).start()
        time.sleep(1)
    if how == "frozen":
        gc.freeze()
        gc.disable()
    if how == "timer":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    if how == "busy_daemon":
        ones = torch.ones(1 << 17)  # not in the thread: torch abort()s in there if Python ends meanwhile
        calls = iter(lambda: dist.all_reduce(ones), 0)  # for ever
        threading.Thread(target=any, args=(calls,), daemon=True).start()
        time.sleep(1)


def leave_with_threads() -> None:
    """Threads that communicate outlive the main thread, which ends first and destroys nothing."""
    dist.init_process_group("mpiplus")
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        threading.Thread(target=communicate, args=(group,)).start()
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()


def communicate(group: dist.ProcessGroup) -> None:
    for _ in range(50):
        check_works(group)
    say("thread end")


def wait_for_ever(leaves: bool = False) -> None:
    """The others: in a collective that the last rank does not come to."""
    if leaves:  # its groups, of which they hear; on a busy machine its end may come long after
        diagnosis.LEAVING_GRACE = 20.0
    say("waits")
    dist.all_reduce(torch.ones(3))
    say("came out of the collective")


def one_raises(how: str, seconds: str = "1800") -> None:
    """The last rank fails while the others wait for it in a collective, for so long."""
    dist.init_process_group("mpiplus")
    check_works()
    dist.group.WORLD.set_timeout(timedelta(seconds=float(seconds)))
    if ME != LAST:
        wait_for_ever(how == "destroyed")
    works = []
    try:
        if how == "pending":
            works = [dist.irecv(torch.ones(3), 0, tag=5), dist.isend(torch.ones(1 << 22), 0, tag=6)]
        if how == "threads":
            threading.Thread(target=dist.recv, args=(torch.ones(3), 0), kwargs={"tag": 6}).start()
        fail()
    finally:
        if how == "destroyed":
            dist.destroy_process_group()
    del works


def fail() -> None:
    shared = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/mpich_shm_" in line}
    Path("fails").write_text("\n".join(shared))  # from now on counts how long the job takes to end
    raise ArithmeticError("this one is meant")


def one_exits(who: str, how: str) -> None:
    """One rank ends with an exit code while the others wait for it."""
    if how == "mpi4py":
        from mpi4py import MPI  # noqa: F401
    dist.init_process_group("mpiplus")
    check_works()
    if int(who) != ME:
        wait_for_ever(leaves=True)
    Path("fails").touch()
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "SystemExit":
        raise SystemExit(3)
    sys.exit(3)


def all_exit() -> None:
    """An orderly end with an error, of all ranks alike."""
    dist.init_process_group("mpiplus")
    check_works()
    sys.exit("nothing to do")


def exit_caught(how: str, whose_mpi: str = "ours", by: str = "except") -> None:
    """One rank's SystemExit does not end its program, nor the job where that rank comes to its end first."""
    if whose_mpi == "mpi4py's":
        from mpi4py import MPI  # noqa: F401 - initialises it, and finalises it before the exit code is known to C
    dist.init_process_group("mpiplus")
    check_works()
    if ME == LAST and by == "thread":
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start()
        thread.join()
    elif ME == LAST:
        try:
            sys.exit(3)
        except SystemExit as error:
            assert (error.code, str(error), type(error).__name__) == (3, "3", "SystemExit")
            say("stays")
    elif how == "leaves":
        time.sleep(3)  # longer than the others get to leave, after a failure
    if how == "stays":
        check_works()


def pending(what: str) -> None:
    """An operation that nobody matches is pending when the program ends, or ends MPI."""
    dist.init_process_group("mpiplus")
    check_works()
    if ME == 0:
        dist.irecv(torch.ones(3), LAST, tag=5)
    finalize = sys.modules["mpi4py.MPI"].Finalize
    {"program": int, "MPI": finalize, "group": dist.destroy_process_group}[what]()


def destroyed_meanwhile() -> None:
    """A rank destroys a group in which the others wait: they hear of it, and who handles that ends in order."""
    dist.init_process_group("mpiplus")
    for group in (dist.new_group(), dist.group.WORLD):
        check_works(group)
        check_works()
        if ME == LAST:
            dist.destroy_process_group(group)
        else:
            with raises(dist.DistBackendError, f"waiting for rank {LAST}, which left"):
                dist.all_reduce(torch.ones(3), group=group)
    if dist.is_initialized():
        dist.destroy_process_group()


def interrupted(directory: str) -> None:
    """Ctrl-C reaches a rank inside a collective, which goes on when the rank it waits for comes."""
    sign = Path(directory) / "interrupted"
    dist.init_process_group("mpiplus")
    pids = [None] * SIZE
    dist.all_gather_object(pids, os.getpid())
    tensor = torch.full((3,), float(ME + 1))
    if ME == 0:
        while "waits for all_reduce" not in monitor.monitor.ask([1]).get(1, ""):  # before, nobody would catch it
            pass
        os.kill(pids[1], signal.SIGINT)
        wait_for(sign)  # rank 1 leaves the collective without any help from this rank
        dist.all_reduce(tensor)
    else:
        try:
            dist.all_reduce(tensor)
        except KeyboardInterrupt:
            sign.touch()
        else:
            raise AssertionError("not interrupted")
    check_works()
    dist.destroy_process_group()


def interrupt_not_caught() -> None:
    """Ctrl-C ends a rank that waits, and with it the job."""
    dist.init_process_group("mpiplus")
    check_works()
    if ME == LAST:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        dist.recv(torch.ones(3), 0)
    wait_for_ever()


run(globals())
