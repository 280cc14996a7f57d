"""The end of the process: threads first, then our communicators, then MPI; or the whole job, at once.

A rank that leaves while others wait for it would hang them, or itself in MPI_Finalize. So an uncaught
exception, or operations that do not complete within a grace, end the job with MPI_Abort.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any, NoReturn

from .. import forks, settings
from ..diagnosis import frames, monitor
from ..engine import engine
from ..errors import DistBackendError
from ..group import starting, world
from ..mpi import failures, runtime
from ..names import counted
from ..node import leaving
from ..store import checkin, tcp_store

_uncaught = False
#: The exit code of a sys.exit() that ends the program; see _Exit.
_noted_code = 0
#: Seconds that the others get to leave too, after sys.exit with an error: less than it takes them to notice.
_EXIT_GRACE = 1.0
#: Seconds that MPI_Abort may take, which tells the launcher: longer than that only where that has gone.
_ABORT_SECONDS = 20.0
#: Seconds that an answer of the store is waited for at exit: long, for the machine may be busy.
_STORE_GRACE = 30.0
#: Python's end takes the program's handlers back. In MPI_Finalize, which may last, these would kill.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
#: Whether an uncaught exception ends the job: the user's word, in Options, and that of the variable.
abort_on_exception = True
_abort_setting = True
_done = False


def read_settings() -> None:
    """With every new world. Not at exit, where a wrong value could no longer be refused."""
    global _abort_setting
    runtime.doubt = ""  # of a world that was given up before
    _abort_setting, engine.grace_seconds = settings.ABORT_ON_EXCEPTION.value(), settings.EXIT_GRACE.value()


@functools.cache
def install() -> None:
    """Register what happens at exit, before anything of ours may fail: a rank that does must end, and the job with it.

    MPI runs by now, so ours comes before mpi4py's finalize, if that is who does it.
    """
    read_settings()
    if watch_for_uncaught_exceptions() is not sys.excepthook:  # another has replaced ours since a world was refused
        watch_for_uncaught_exceptions.cache_clear()
        watch_for_uncaught_exceptions()
    _watch_for_sys_exit()
    runtime.mpi().COMM_SELF.Set_attr(_finalize_key(), True)
    if not runtime.we_finalize:  # else _autoload has it called later; mpi4py's handler was registered before
        atexit.register(at_exit)
    # Before Python joins the user's threads, which may be waiting for ranks that wait for this one.
    with contextlib.suppress(AttributeError, RuntimeError):
        threading._register_atexit(_abort_after_exception)  # type: ignore[attr-defined]


@functools.cache
def watch_for_uncaught_exceptions() -> Any:
    """By a hook, which is returned: note it, tell the supervisor, and end its traceback at the user's program."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        global _uncaught  # noqa: PLW0603
        _uncaught = True
        if not forks.forked:
            leaving.tell(1)
        shown = frames.of_uncaught(value)
        previous(kind, value.with_traceback(shown), shown)  # Python's own goes by that of the exception
        value.__traceback__ = traceback

    sys.excepthook = hook
    return hook


@functools.cache
def _finalize_key() -> int:
    """Of an attribute of COMM_SELF: MPI_Finalize deletes those first of all."""
    return int(runtime.mpi().Comm.Create_keyval(delete_fn=_mpi_is_finalized))


def _mpi_is_finalized(*_: Any) -> None:
    """The program does so itself: nothing of a group may call MPI from here on."""
    if not _done and not forks.forked and (ours := engine.running()) is not None:
        _end_job_if_busy(ours)
    for group in [] if _done or forks.forked else world.remembered():
        group._calls.broken = group._calls.broken or f"{group.label} {starting.FINALIZED}"
        group.communicator.may_be_sent_to, group.user_communicator = True, None


def _watch_for_sys_exit() -> None:
    original = sys.exit

    @functools.wraps(original)
    def noting(code: Any = None, /) -> NoReturn:
        if threading.current_thread() is not threading.main_thread():
            original(code)  # ends the thread; threading knows it by its exact type
        raise _Exit(code)

    sys.exit = noting


class _Exit(SystemExit):
    """The exception that sys.exit raises: a SystemExit that notes when the interpreter ends with it.

    Only then is its code asked for with no call of Python's under way. One that is caught, or that ends a thread, says
    nothing of how the program will end. (C sees the real exit code, but only after mpi4py has finalised MPI, if that is
    who does: too late for a rank that would hang there.)
    """

    @property
    def code(self) -> Any:
        given = vars(self)["given"] if "given" in vars(self) else (self.args[0] if self.args else None)
        try:
            sys._getframe(1)
        except ValueError:
            global _noted_code  # noqa: PLW0603
            _noted_code = (given if isinstance(given, int) else int(given is not None)) & 0xFF
        return given

    @code.setter
    def code(self, given: Any) -> None:
        vars(self)["given"] = given


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"  # as tracebacks and logs call it
_Exit.__module__ = "builtins"


def _others_go_on() -> bool:
    """Return whether ranks are left that a failure of this one would hang, or hang it in MPI_Finalize."""
    left = world.checkin
    if left is None or left.size == 1 or not _aborts():
        return left is None and runtime.doubt != "" and _aborts()
    if not _noted_code and not world.groups():
        return False  # all is destroyed, perhaps rank 0's store too: to ask it would print torch's C++ backtraces
    until = time.monotonic() + (_EXIT_GRACE if _noted_code else 0.0)
    while len(left.departed()) < left.size:
        if time.monotonic() >= until:
            return True
        time.sleep(0.05)
    return False


def _end_job_on_failure(pending: bool) -> None:
    """Only C will know the exit code. What the program said it would be counts where MPI's end is not ours to see."""
    ours = runtime.end_job_on_failure(runtime.mpi().COMM_WORLD.Get_rank())
    if _noted_code and (not ours or pending):
        abort_job(f"exit code {_noted_code}, while others go on", _noted_code)


def abort_job(reason: str, code: int = 1) -> None:
    """End all ranks, with ``reason`` as the last word."""
    rank = runtime.mpi().COMM_WORLD.Get_rank()
    print(f"mpiplus: rank {rank} ends the job: {reason}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    time.sleep(0.2)  # a launcher that is told to kill may not forward what it has not read yet
    runtime.remove_segment()
    with runtime.ending("MPI_Abort", _ABORT_SECONDS):
        runtime.shim().lib.mpp_end_job(code)


def _aborts() -> bool:
    return abort_on_exception and _abort_setting


def _abort_after_exception() -> None:
    if not _aborts() or not _uncaught or forks.forked or runtime.mpi().Is_finalized():
        return
    if runtime.mpi().COMM_WORLD.Get_size() > 1:
        abort_job("an uncaught exception (above)")


def at_exit() -> None:
    """Once, where MPI was used: see the top of this file."""
    global _done  # noqa: PLW0603
    if forks.forked or _done or not install.cache_info().currsize:
        return
    _done = True
    ours = engine.running()
    if runtime.mpi().Is_finalized():
        if ours is not None:
            ours.stop()  # somebody finalised MPI under our feet; nothing may be called any more
        if monitor.monitor is not None:
            monitor.monitor.stop()
        checkin.wait_for_threads(_STORE_GRACE)
        return
    leaving.tell(_noted_code)
    _abort_after_exception()
    with contextlib.suppress(ValueError):  # Python ends on a thread that may not
        for notice in filter(lambda notice: callable(signal.getsignal(notice)), _NOTICES):
            signal.signal(notice, signal.SIG_IGN)
    for group in world.remembered():
        group.leave()
        group.take_back_failed()
        _outlive_python(group.get_group_store())
    _outlive_python(tcp_store.kept)
    if _others_go_on():
        _end_job_on_failure(ours is not None and bool(ours.pending()))
    if ours is not None:
        _end_job_if_busy(ours)
        ours.stop()
    runtime.mpi().COMM_SELF.Delete_attr(_finalize_key())  # at our own end MPI must not call Python
    for group in world.remembered():
        group._calls.broken = group._calls.broken or f"{group.label} {starting.ENDED}"
        group.shutdown()
    runtime.shim().lib.mpp_cuda_release()
    if runtime.has_parents or failures.failed_ranks(runtime.mpi().COMM_WORLD, listen=True):
        runtime.leave_unfinalized()
    if not checkin.wait_for_threads(max(_STORE_GRACE, engine.grace_seconds)):
        abort_job("rank 0 does not answer, whose store tells the others that this rank has come to its end")
    if not runtime.prepare_finalize(engine.grace_seconds):
        abort_job("a call of MPI's was given up and has not come back, so that MPI cannot end in order")


def _outlive_python(kept: Any) -> None:
    """Keep beyond Python's end what the wait in MPI_Finalize needs: rank 0's store, for the others."""
    if kept is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _end_job_if_busy(ours: engine.Engine) -> None:
    begun = ours.unseen()
    engine.wait_within_grace(lambda: all(work.abandoned or work in engine.waiting.values() for work in ours.pending()))
    # Threads that communicate by now are daemons, which end with Python, in silence.
    waited, hook = list(engine.waiting.values()), threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, DistBackendError) else hook(args)
    for work in ours.pending():
        if work.abandoned:  # the others may be through; MPI may use the buffers to its end
            _outlive_python(work)
            runtime.doubt = f"{work} has failed, and MPI is still busy with it"
    begun += [work for work in ours.pending() if not work.abandoned]
    left = [work for work in dict.fromkeys(begun) if work not in waited and not work.is_success()]
    if left:
        names = ", ".join(dict.fromkeys(str(work.exception() or work) for work in left[:4]))  # whose ranks have left
        cure = "wait() for them and call destroy_process_group() before the program ends"
        abort_job(f"{counted(len(left), 'operation')} still pending at exit ({names}); {cure}")
