"""MPI itself, through mpi4py: initialised at most once, finalised only if we initialised it."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import forks, settings
from ..flavours import Flavour, flavour_of
from ..launchers import variables as launchers
from ..names import log
from ..node import processes
from ..tensors.dtypes import MPI_DATATYPES, MPI_OPERATIONS
from . import library as mpi_library
from . import pmi

if TYPE_CHECKING:
    from .._shim import FFI, Lib

T = TypeVar("T")

#: Seconds between two looks at whether a call of MPI can still come back.
_LOOK_EVERY = 1.0


class Shim(NamedTuple):
    """The compiled shim that fits the MPI at hand."""

    lib: Lib
    ffi: FFI


#: MPI is ours to finalize, after all of Python.
we_finalize = False
#: Some rank has started another, and may wait for the end of that, which in MPI_Finalize would wait for it. One that
#: multiprocessing has forked never comes to MPI_Finalize.
has_parents = False
#: The shim's functions, once they are loaded.
_lib: Lib | None = None


def _after_fork_in_child() -> None:
    if forks.forked and _lib is not None:  # that module's hook comes first, as it was registered first
        _lib.mpp_note_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def refuse_in_forked_child(doing: str) -> None:
    """Raise a RuntimeError there: MPI knows one process, and takes what a child says for the parent's word."""
    if forks.forked:
        raise RuntimeError(
            f"{doing} in a process forked from an MPI rank: MPI does not survive a fork. Communicate in the parent "
            f"only, or start workers with the spawn method"
        )


def refuse_without_mpi(doing: str) -> None:
    """Raise a RuntimeError in a forked child, after the program's own MPI_Finalize, and where threads are none."""
    refuse_in_forked_child(doing)
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_finalized():
        raise RuntimeError(f"{doing}: the program has called MPI_Finalize, and MPI cannot be started again")
    if not isinstance(_thread.allocate_lock, BuiltinFunctionType):  # tools that watch threads leave this one alone
        raise RuntimeError(
            f"{doing}: gevent or eventlet has made greenlets of Python's threads, and mpiplus needs real ones. Leave "
            "threads out: monkey.patch_all(thread=False) of gevent, monkey_patch(thread=False) of eventlet"
        )


def flavour() -> Flavour:
    return flavour_of(str(mpi_library.load().Get_library_version()))


def _initialise(module: Any) -> None:
    """MPI_Init as mpi4py's settings (``mpi4py.rc``) ask for it: by default with MPI_THREAD_MULTIPLE."""
    global we_finalize  # noqa: PLW0603
    import mpi4py

    if few := processes.scarcity_of_files():
        me = launchers.who_am_i(os.environ)
        log.warning("mpiplus: rank %s on %s: %s", "?" if me is None else me.rank, socket.gethostname(), few)
    level = str(mpi4py.rc.thread_level) if mpi4py.rc.threads else "single"
    we_finalize = True
    waits_for = (
        "It waits for all processes of the job: each of them must call init_process_group, or import mpi4py.MPI. One "
        "that computes first, has failed or cannot be reached holds up all"
    )
    lib = mpi_library.import_shim(module).lib
    with pmi.memory_of_zeros(), ending("MPI_Init", _init_seconds, waits_for, lib):
        module.Init_thread(getattr(module, f"THREAD_{level.upper()}"))


#: How long MPI_Init may take.
_init_seconds = math.inf


def start_within(seconds: float) -> None:
    """Start MPI, if it is not. MPI_Init cannot be interrupted: after so long this process ends, and says why."""
    global _init_seconds  # noqa: PLW0603
    _init_seconds = seconds
    refuse_without_mpi("init_process_group")
    mpi()


_CUT_OFF = "A call of MPI's has not come back: a rank's node may be cut off"


@contextlib.contextmanager
def ending(doing: str, seconds: float, why: str = _CUT_OFF, early: Lib | None = None) -> Iterator[None]:
    """Within, this process ends with the reason if it is not over in time: for calls of MPI's that do not come back.

    Only one at a time counts, the outermost. Whatever has a deadline of its own raises at that, well before. ``early``
    are the shim's functions, before MPI is there; then the wait is reported as well.
    """
    lib = early or shim().lib
    began = _begin_deadline(lib, doing, seconds, why, has_word=early is not None)
    try:
        yield
    finally:
        if began:
            lib.mpp_deadline_over()


def _begin_deadline(lib: Lib, doing: str, seconds: float, why: str, has_word: bool = True) -> bool:
    watchdog = settings.WATCHDOG.value() if has_word else 0.0
    who = f"process {os.getpid()} on {socket.gethostname()}"
    until = f", until {seconds:g} s have passed" if seconds < math.inf else ""
    word = f"mpiplus: {who} has waited {watchdog:g} s in {doing}, and goes on waiting{until}. {why}.\n"
    last_word = f"mpiplus: {who} ends: {doing} has not come back after {seconds:g} s. {why}.\n"
    return lib.mpp_deadline(word.encode(), watchdog if watchdog > 0 else -1.0, last_word.encode(), seconds, 1) == 0


def library_name(mpi: Any) -> str:
    """The first line of the MPI library's own description."""
    return str(mpi.Get_library_version()).split("\n")[0].split(",")[0].strip("\x00 \t")


def mpi() -> Any:
    """``mpi4py.MPI``, initialised; a RuntimeError: no MPI library, or a forked child."""
    refuse_in_forked_child("MPI is wanted")
    return _started()


@functools.cache
def _started() -> Any:
    mpi = mpi_library.load()
    if not mpi.Is_initialized():
        launchers.check_not_a_ranks_child()
        launchers.check_fit(mpi_library.describe(mpi))
        _initialise(mpi)
    launchers.mark_as_rank()
    _load_shim(mpi)  # first of all, as it sees to finalising: a failure from here on must leave that in place
    _check_world(mpi)
    return mpi


def _check_world(module: Any) -> None:
    launch = launchers.detect()
    if launch is not None and launch.size > 1 and module.COMM_WORLD.Get_size() == 1:
        told = launchers.explain_misfit(launch, mpi_library.describe(module))
        raise RuntimeError(f"{told} (MPI sees a world of one rank.)")


def progress_allowed(module: Any) -> bool:
    """Return whether a thread of ours may call MPI while the user's threads do something else."""
    return bool(module.Query_thread() >= module.THREAD_SERIALIZED)


@functools.cache
def warn_of_thread_level(level: int) -> None:
    """Say once what a thread level below MULTIPLE means."""
    module = mpi()
    if level >= module.THREAD_MULTIPLE:
        return
    names = {getattr(module, name): f"MPI_{name}" for name in dir(module) if name.startswith("THREAD_")}
    if level == module.THREAD_SERIALIZED:
        effect = "your own MPI calls must not overlap with an unfinished mpiplus operation"
    else:
        effect = (
            "asynchronous operations advance only inside calls to torch.distributed, and only the thread that "
            "initialised MPI may make them"
        )
    how = "Let mpiplus or mpi4py initialise MPI with MPI_THREAD_MULTIPLE"
    log.warning("mpiplus: MPI provides only %s; %s. %s.", names[level], effect, how)


@functools.cache
def _is_multiple() -> bool:
    """Return whether any thread may call MPI; asked once, for the program may finalize MPI before we are at the end."""
    return bool(mpi().Query_thread() == mpi().THREAD_MULTIPLE)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """For calls to MPI through mpi4py: where MPI wants one call at a time, no other thread of ours makes one meanwhile.

    Within it the engine stands still, so nothing in it may wait for what another rank does only after it has heard of
    an operation of ours.
    """
    if _is_multiple():
        yield
        return
    lib = shim().lib
    try:
        lib.mpp_lock()
        yield
    finally:
        lib.mpp_unlock()


@contextlib.contextmanager
def progressing() -> Iterator[None]:
    """For waits outside MPI: what the program has under way in MPI moves on, as in a call of MPI's that waits."""
    module, lib = sys.modules.get("mpi4py.MPI"), _lib
    alive = module is not None and module.Is_initialized() and not module.Is_finalized()
    if lib is None or not alive or not progress_allowed(module) or lib.mpp_engine_start():
        yield
        return
    try:
        lib.mpp_tend_mpi(1)
        yield
    finally:
        lib.mpp_tend_mpi(-1)


def within(seconds: float, call: Callable[[], T], look: Callable[[], Exception | None] = lambda: None) -> T:
    """Make a blocking call of MPI that has no deadline; ask every second why there is nothing to wait for any more.

    Below ``MPI_THREAD_MULTIPLE`` it has none here either: no other thread may call MPI then.

    Raises:
        TimeoutError: it has not come back; its thread is left behind, and may come back when others come late.
        Exception: what ``look`` gave, likewise.
    """
    if not _is_multiple():
        with exclusive():
            return call()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="mpiplus-mpi", daemon=True)
    thread.start()
    until, gone = time.monotonic() + seconds, None
    while thread.is_alive() and gone is None and time.monotonic() < until:
        thread.join(min(_LOOK_EVERY, max(0.0, until - time.monotonic())))
        gone = look() if thread.is_alive() else None
    if outcome.done():
        return outcome.result()
    _stuck.append(thread)
    raise gone or TimeoutError(f"MPI has not come back after {seconds:g} s")


@functools.cache
def shim() -> Shim:
    """Load the shim for this MPI's kind of handle, and tell it MPI's constants; a RuntimeError: the two do not fit."""
    return _load_shim(mpi())


@functools.cache
def _load_shim(module: Any) -> Shim:
    extension = mpi_library.import_shim(module)
    lib: Lib = extension.lib
    ffi: FFI = extension.ffi
    if why_not := lib.mpp_load(module.__file__.encode()):
        raise RuntimeError(
            f"torchmpi-plugin cannot use {library_name(module)}, the MPI that mpi4py loaded: "
            f"{ffi.string(why_not).decode(errors='replace')} ({module.__file__}). MPI 3.0 or later is needed."
        )
    _set_constants(module, lib)
    global _lib  # noqa: PLW0603
    _lib = lib
    if we_finalize:
        lib.mpp_own_mpi(1)
        lib.mpp_finalize_at_exit()  # after all of Python, the user's exit handlers included
    return Shim(lib, ffi)


def end_job_on_failure(rank: int) -> bool:
    """An exit code other than 0 ends the job, with that code; False where others see to MPI's end."""
    if we_finalize:
        shim().lib.mpp_end_job_on_failure(rank)
    return we_finalize


#: Threads that were left behind in a call of MPI's.
_stuck: list[threading.Thread] = []
#: Why MPI_Finalize may wait for ever, where it may; it has a deadline then.
doubt = ""
#: Seconds that it has: the other ranks may have work left, and need not be stuck.
_FINALIZE_SECONDS = 1800.0


def prepare_finalize(grace: float) -> bool:
    """The last of what is done in Python: see that the end neither hangs nor takes ranks along that go on.

    Threads in MPI, whose call may have been answered late, have some grace. False: MPI can no longer be ended in order.
    """
    until = time.monotonic() + grace
    for thread in _stuck:
        thread.join(max(0.0, until - time.monotonic()))
    is_stuck = any(thread.is_alive() for thread in _stuck)
    if is_stuck and not flavour().keeps_finalize_threads:
        leave_unfinalized()
        return flavour().waits_in_pmi and pmi.finalize(os.environ)
    why = "A call of MPI's was given up, which has not come back" if is_stuck else doubt
    if why:
        _begin_deadline(shim().lib, "MPI_Finalize", _FINALIZE_SECONDS, f"{why}; not all ranks may come to their end")
    return True


_MPICH_SEGMENT = "/dev/shm/mpich_shm_"


def leave_unfinalized() -> None:
    """Leave out MPI_Finalize at the end of the program, where it may wait for ranks that have died."""
    global we_finalize  # noqa: PLW0603
    we_finalize = False
    shim().lib.mpp_own_mpi(0)
    remove_segment()


def remove_segment() -> None:
    """Take away the name of the memory that MPICH's ranks of a node share: without MPI_Finalize it would stay."""
    with contextlib.suppress(OSError, ValueError):  # a name that is no UTF-8: whoever leaves must not fail
        for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
            if _MPICH_SEGMENT in line:
                Path(line[line.index("/") :]).unlink(missing_ok=True)


def handle_of(thing: Any) -> int:
    """An MPI handle as a signed number: MPICH's are 32 bits with the top one set, shown as unsigned by mpi4py."""
    value = int(sys.modules["mpi4py.MPI"]._handleof(thing))
    return value - (1 << 64) if value >= 1 << 63 else value


def _set_constants(module: Any, lib: Lib) -> None:
    def put(name: str, value: int, index: int = 0) -> None:
        if lib.mpp_set_constant(name.encode(), index, value):
            raise RuntimeError(f"torchmpi-plugin is damaged: its compiled part does not know the constant {name}")

    for name in ("BYTE", "REQUEST_NULL", "COMM_WORLD"):
        put(name, handle_of(getattr(module, name)))
    put("RANK", module.COMM_WORLD.Get_rank())
    put("IN_PLACE", int(module.IN_PLACE))
    put("ANY_SOURCE", module.ANY_SOURCE)
    put("status_source_offset", _status_source_offset(module))
    for index, name in MPI_DATATYPES.items():
        put("datatype", handle_of(getattr(module, name)), index)
    for index, name in MPI_OPERATIONS.items():
        put("op", handle_of(getattr(module, name)), index)


def _status_source_offset(module: Any) -> int:
    """Find where MPI_SOURCE lies in this library's MPI_Status: set it and look."""
    size = module._sizeof(module.Status)
    status = module.Status()
    mark = 0x5AC3B1
    status.Set_source(mark)
    offset = ctypes.string_at(module._addressof(status), size).find(mark.to_bytes(4, "little"))
    if size > 64 or offset < 0:
        raise RuntimeError(
            f"torchmpi-plugin cannot read MPI_Status of {library_name(module)} ({size} bytes); please report it"
        )
    return offset
