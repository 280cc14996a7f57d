"""Makes of a template's child the process that a client stands for."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import functools
import importlib
import importlib.machinery
import io
import os
import resource
import runpy
import signal
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: As in client.c.
FRESH, STARTED = 0, 1
PR_SET_PDEATHSIG = 1
NAMESPACES = ("net", "uts", "ipc", "mnt")
RESOURCES = range(16)
#: Python ignores two of these from its start; nobody can set the others.
LEFT_ALONE = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGKILL, signal.SIGSTOP}
#: Where in memory arguments and environment begin and end: fields of /proc/self/stat, counted from the state.
AREAS = {"arguments": (45, 46), "environment": (47, 48)}
libc = ctypes.CDLL(None, use_errno=True)
Program = Callable[[], object]


def take_on(request: Any, template: int) -> Program:
    """What runs the client's program, in a process that has become what the client is.

    Where that fails, this process ends, and the client becomes a fresh one.
    """
    above = max([*request.descriptors, 2]) + 1  # where nothing is in the way of a number that a client had
    connection, log = (_moved(descriptor, above) for descriptor in (request.connection.fileno(), 2))
    request.connection.close()
    try:
        program = _take_on(request, template, above)
    except BaseException as error:
        os.write(log, f"fork server: this becomes a fresh process: {error!r}\n".encode())
        os.write(connection, struct.pack("=ii", FRESH, 0))
        os._exit(1)
    os.close(log)
    with contextlib.suppress(OSError):  # the client has been killed, and this process will be
        os.write(connection, struct.pack("=ii", STARTED, os.getpid()))
    os.close(connection)
    return program


def _take_on(request: Any, template: int, above: int) -> Program:
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template:
        raise ProcessLookupError("the template has ended")
    client = Path(f"/proc/{request.process}")
    environment, arguments = (_words(client / name) for name in ("environ", "cmdline"))
    limits = {number: resource.prlimit(request.process, number) for number in RESOURCES}
    os.sched_setaffinity(0, os.sched_getaffinity(request.process))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request.process))
    os.umask(int(_status(client, "Umask"), 8))
    _places(client)
    _descriptors(request.descriptors, above)
    _environment([os.fsencode(sys.executable), *arguments[1:]], environment)
    _python_state()
    program = _program([os.fsdecode(word) for word in arguments[1:]])
    _streams()
    for number, limit in limits.items():
        if resource.getrlimit(number) != limit:
            resource.setrlimit(number, limit)
    _signals(request.blocked, request.ignored)
    return program


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")[:-1]


def _status(process: Path, name: str) -> str:
    return (process / "status").read_text().partition(f"\n{name}:")[2].split(maxsplit=1)[0]


def _moved(descriptor: int, above: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)


def _places(client: Path) -> None:
    """The working directory, in the client's namespaces: the hosts of tests are such."""
    directory = os.open(client / "cwd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    others = [
        os.open(client / "ns" / name, os.O_RDONLY | os.O_CLOEXEC)
        for name in NAMESPACES
        if os.readlink(client / "ns" / name) != os.readlink(f"/proc/self/ns/{name}")
    ]
    for namespace in others:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.fchdir(directory)
    for descriptor in (directory, *others):
        os.close(descriptor)


def _descriptors(of_numbers: dict[int, int], above: int) -> None:
    """Each gets the number that it had at the client; and no others stay but what is above."""
    moved = {number: _moved(descriptor, above) for number, descriptor in of_numbers.items()}
    os.closerange(0, above)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def _environment(arguments: list[bytes], environment: list[bytes]) -> None:
    """For Python, for C, and for those who read /proc/PID/environ: the template's own is written over."""
    os.environb.clear()
    for word in environment:
        name, _, value = word.partition(b"=")
        if name:
            os.environb[name] = value
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for area, words in (("arguments", arguments), ("environment", environment)):
        start, end = (int(fields[place]) for place in AREAS[area])
        text = b"".join(word + b"\0" for word in words)
        if len(text) > end - start:
            raise OverflowError(f"no room for the {area}")
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _python_state() -> None:
    """What a process has for itself alone. (Python sees to `random`.)"""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    tempfile.tempdir = None  # from TMPDIR
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "measured_process" in sys.modules:  # .ci/measured_process.py; whether it is measured, its own variables say
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "measured_process"]
        del sys.modules["measured_process"]
        importlib.import_module("measured_process")


def _program(arguments: list[str]) -> Program:
    """As Python's own command line: the module __main__, sys.argv and the first entry of sys.path.

    No function of ours is on the stack below the program. A mistake of its syntax is for a fresh process to tell.
    """
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    match arguments:
        case ["-m", name, *_]:
            first, sys.argv = os.getcwd(), ["-m", *arguments[2:]]
            program: Program = functools.partial(runpy._run_module_as_main, name)  # type: ignore[attr-defined]
        case ["-c", text, *_]:
            first, sys.argv = "", ["-c", *arguments[2:]]
            program = functools.partial(exec, compile(text, "<string>", "exec", dont_inherit=True), vars(main))
        case [path, *_] if not path.startswith("-") and Path(path).is_file():
            first, sys.argv = os.path.dirname(os.path.realpath(path)), arguments
            whole = os.path.join(os.getcwd(), path)
            loader = importlib.machinery.SourceFileLoader("__main__", whole)
            vars(main).update(__file__=whole, __cached__=None, __loader__=loader)
            with io.open_code(whole) as file:
                code = compile(file.read(), whole, "exec", dont_inherit=True)
            program = functools.partial(exec, code, vars(main))
        case _:
            raise ValueError(f"a command line for Python itself: {arguments[:1]}")
    sys.orig_argv = [sys.executable, *arguments]
    sys.modules["__main__"] = main
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first)
    return program


def _streams() -> None:
    """As Python makes them at its start (create_stdio in pylifecycle.c), on what is there now."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        template, stream = getattr(sys, name), None
        with contextlib.suppress(OSError):
            unbuffered = template.write_through
            is_raw = unbuffered and number > 0
            raw = open(number, "wb" if number else "rb", buffering=0 if is_raw else -1, closefd=False)  # noqa: SIM115
            (raw if is_raw else raw.raw).name = f"<{name}>"  # type: ignore[attr-defined]
            stream = io.TextIOWrapper(
                raw,
                template.encoding,
                template.errors,
                newline="\n",
                line_buffering=not unbuffered and (number == 2 or raw.isatty()),
                write_through=unbuffered,
            )
            stream.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _signals(blocked: int, ignored: int) -> None:
    """What the client ignores and blocks; else Python's and the system's own answers."""
    for number in signal.valid_signals() - LEFT_ALONE:
        is_ignored = ignored >> (number - 1) & 1
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        wanted = signal.SIG_IGN if is_ignored else default
        if signal.getsignal(number) != wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, {n for n in signal.valid_signals() if blocked >> (n - 1) & 1})
