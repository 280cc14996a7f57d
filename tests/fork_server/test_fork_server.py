"""A process from the fork server is what a fresh one is: the same program, run as both, says and does the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patient, wait_until

import fork_server

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("MPIPLUS_TEST_COVERAGE", None)
SECONDS = patient(60)
#: Everything that a program can ask about how it was started, as JSON.
WHO_AM_I = """
import fcntl, gc, json, locale, logging, os, resource, signal, stat, sys, threading, warnings
import torch, torch.distributed
def kinds(number):
    status = os.fstat(number)
    return stat.S_IFMT(status.st_mode), status.st_ino, fcntl.fcntl(number, fcntl.F_GETFD)
main = sys.modules["__main__"]
numbers = sorted(signal.valid_signals())
status = open("/proc/self/status").read()
def of_status(name):
    return status.partition(f"\\n{name}:")[2].split()[0]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "executable": sys.executable,
    "flags": str(sys.flags),
    "cwd": os.getcwd(), "environment": dict(os.environ), "umask": os.umask(0o22),
    "seen": open("/proc/self/environ", "rb").read().rstrip(b"\\0").decode(),
    "command": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode(),
    "descriptors": {n: kinds(n) for n in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{n}")},
    "limits": [resource.getrlimit(n) for n in range(16)], "cores": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    "handlers": [str(signal.getsignal(n)).partition(" at 0x")[0] for n in numbers],
    "signals": [of_status(name) for name in ("SigBlk", "SigIgn", "SigCgt")],
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines,
                 type(s.buffer).__name__) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "standard": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "main": {name: str(value).partition(" at 0x")[0] for name, value in vars(main).items() if name.startswith("__")
             and name != "__builtins__"}, "is_main": vars(main) is globals() or __name__,
    "threads": [threading.active_count(), threading.current_thread() is threading.main_thread(),
                threading.main_thread().native_id == os.getpid(), torch.get_num_threads(),
                torch.get_num_interop_threads()],
    "gc": [gc.isenabled(), gc.get_threshold()], "locale": locale.getlocale(),
    "logging": [logging.root.level, len(logging.root.handlers)], "filters": str(warnings.filters),
    "group": os.getpgrp() == os.getpid(),
}))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[fork_server.Server]:
    server = fork_server.Server()
    yield server
    server.stop()
    assert not server.folder.exists()


def start(python: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([python, *arguments], text=True, **{"env": ENVIRONMENT, **pipes, **options})


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def both(server: fork_server.Server, *arguments: str) -> tuple[int, str, str]:
    """What came of it: the same from the server as in a fresh process; and it was from the server."""
    fresh, forked = (ended(start(python, *arguments)) for python in (sys.executable, server.python))
    assert forked == fresh
    return forked


PARENT = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read().split(chr(0))[1])"


def is_forked(python: str) -> bool:
    return ended(start(python, "-c", PARENT))[1].strip().endswith("template.py")


def test_it_forks(server: fork_server.Server) -> None:
    """And does not by chance start fresh processes, which all tests here would be content with."""
    assert is_forked(server.python) and not is_forked(sys.executable)


@pytest.mark.parametrize("how", ["relative", "-m", "-c"])
def test_what_a_program_sees_of_its_start(server: fork_server.Server, tmp_path: Path, how: str) -> None:
    (tmp_path / "folder").mkdir()
    script = tmp_path / "folder" / "who_am_i.py"
    script.write_text(WHO_AM_I)
    started = {"relative": ["../folder/who_am_i.py"], "-m": ["-m", "who_am_i"], "-c": ["-c", WHO_AM_I]}
    read, write = os.pipe()
    options = {
        "cwd": tmp_path / "folder",
        "pass_fds": (read, write),
        "env": {**ENVIRONMENT, "A": "ümläut = \n", "EMPTY": "", "MPIPLUS_SHM": "1", "RANK": "7"},
        "stdout": None,
        "start_new_session": True,
        "preexec_fn": unusual,
    }
    found = []
    for python in (sys.executable, server.python):
        with (tmp_path / "stdout").open("w+") as stdout, (tmp_path / "stderr").open("w+") as stderr:
            process = start(python, *started[how], "--x", "a b", "", **{**options, "stdout": stdout, "stderr": stderr})
            code = ended(process)[0]
            assert code == 0, (tmp_path / "stderr").read_text()
        found.append(json.loads((tmp_path / "stdout").read_text()))
    os.close(read)
    os.close(write)
    fresh, forked = found
    assert forked["argv"][1:] == ["--x", "a b", ""]
    assert [(name, fresh[name], forked[name]) for name in fresh if fresh[name] != forked[name]] == []


def unusual() -> None:
    """What a launcher may do before it starts a rank."""
    import resource

    os.umask(0o27)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, 900))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    os.nice(1)


ENDINGS = {
    "exit code": "import sys; sys.exit(3)",
    "exception": "def one(): return 1 / 0\none()",
    "in an exit handler": "import atexit; atexit.register(lambda: print('bye')); raise ValueError('ünusual')",
    "Ctrl-C": "import atexit; atexit.register(lambda: print('bye')); raise KeyboardInterrupt",
    "_exit": "import os; print('lost', end=''); os._exit(4)",
    "C's exit handlers": "import ctypes; libc = ctypes.CDLL(None); ctypes.pythonapi.Py_AtExit(libc.getpid); "
    "libc.on_exit(libc.puts, b'x'); libc.atexit(libc.abort)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_the_end(server: fork_server.Server, tmp_path: Path, how: str) -> None:
    """Exit code or signal, tracebacks, what is printed; as a script and with -c."""
    script = tmp_path / "program.py"
    script.write_text(ENDINGS[how])
    as_script = both(server, str(script))
    assert as_script[0] == both(server, "-c", ENDINGS[how])[0]
    if how == "exception":
        assert as_script[2].startswith("Traceback (most recent call last):\n  File") and "one()" in as_script[2]


# ---- signals ----

WAITS = """
import os, signal, sys, time
sys.stdout.reconfigure(line_buffering=True)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: print(signal.Signals(number).name))
print(os.getpid())
while True: time.sleep(0.05)
"""


class Waiting:
    """A rank that says which signals it gets, and its client."""

    def __init__(self, server: fork_server.Server, program: str = WAITS, **options: Any) -> None:
        self.client = start(server.python, "-c", program, **{"start_new_session": True, **options})
        assert self.client.stdout is not None
        self.rank = int(self.client.stdout.readline())
        assert self.rank != self.client.pid

    def says(self, words: str) -> None:
        assert self.client.stdout is not None
        assert self.client.stdout.readline() == words + "\n"


@pytest.fixture
def waiting(server: fork_server.Server) -> Iterator[Waiting]:
    process = Waiting(server)
    yield process
    process.client.kill()
    process.client.communicate(timeout=SECONDS)


def test_signals_are_passed_on(waiting: Waiting) -> None:
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR1"):
        waiting.client.send_signal(signal.Signals[name])
        waiting.says(name)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_that_ends_it(waiting: Waiting, name: str) -> None:
    waiting.client.send_signal(signal.Signals[name])
    code, _, told = ended(waiting.client)
    assert code == -signal.Signals[name]
    assert ("KeyboardInterrupt" in told) == (name == "SIGINT")


def test_a_signal_for_the_group_reaches_the_ranks_children(server: fork_server.Server) -> None:
    """Launchers send it to the group that they have made of each rank."""
    program = "import os, subprocess, time; print(os.getpid(), flush=True); subprocess.run(['sleep', '1000'])"
    process = Waiting(server, program)
    wait_until(lambda: psutil.Process(process.rank).children(), 20)
    (child,) = psutil.Process(process.rank).children()
    os.killpg(process.client.pid, signal.SIGTERM)
    assert ended(process.client)[0] == -signal.SIGTERM
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20)


def test_a_client_that_is_killed(waiting: Waiting) -> None:
    waiting.client.kill()
    assert ended(waiting.client)[0] == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(waiting.rank), 20)


# ---- servers and templates ----


def template_of(waiting: Waiting) -> psutil.Process:
    found = psutil.Process(waiting.rank).parent()
    assert found is not None and "template.py" in " ".join(found.cmdline())
    return found


def test_a_template_that_is_killed(server: fork_server.Server) -> None:
    """Its ranks and clients end, and the next client has a new one."""
    waiting = Waiting(server)
    template_of(waiting).kill()
    code, _, told = ended(waiting.client)
    assert code == 70 and "fork server: it has ended" in told
    wait_until(lambda: not psutil.pid_exists(waiting.rank), 20)
    assert is_forked(server.python)
