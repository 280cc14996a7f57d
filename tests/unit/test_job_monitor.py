"""Jobs of `mpiplus run` without MPI: what both ends of a connection must not lose, or wait for."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_python import printed

from torchmpi_plugin.jobs.job import run_job
from torchmpi_plugin.jobs.outcome import JobResult
from torchmpi_plugin.jobs.spec import JobSpec
from torchmpi_plugin.jobs.stderr import Tracebacks
from torchmpi_plugin.launchers.mpirun import Launcher, Library

MPIRUN = Path(__file__).parent / "scripts" / "plain_mpirun.py"
#: None of what takes so long may come to pass.
FOREVER = 1000.0
pytestmark = pytest.mark.timeout(90)


def launcher(path: Path, text: str) -> Launcher:
    path.write_text(text)
    path.chmod(0o755)
    return Launcher(str(path), "MPICH", "", Library("MPICH", "4", "MPICH 4", "mpich", "", ""))


@pytest.fixture
def mpirun(tmp_path: Path) -> Launcher:
    return launcher(tmp_path / "mpirun", f'#!/bin/sh\nexec {sys.executable} {MPIRUN} "$@"\n')


def job(mpirun: Launcher, program: str, nproc: int = 1, **options: Any) -> tuple[JobResult, str]:
    """Run a program; its result, and what it has printed."""
    out = io.StringIO()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    settings = {"grace": FOREVER, "prefix": False, "out": out, "err": out, **options}
    return run_job(JobSpec(command, nproc=nproc, launcher=mpirun, **settings)), out.getvalue()


def test_all_signals_and_all_lines_of_a_flood(mpirun: Launcher, tmp_path: Path) -> None:
    """Each signal is passed on, and lines are lost or out of order on no account of it."""
    program = f"""
        import pathlib, signal
        got = 0
        def count(*_):
            global got
            got += 1
            pathlib.Path({str(tmp_path)!r}, f"got{{got}}").touch()
        signal.signal(signal.SIGUSR1, count)
        pathlib.Path({str(tmp_path)!r}, "got0").touch()
        number = 0
        while got < 20:
            print(number, "x" * 1000)
            number += 1
        print("last", number)
    """

    def signals() -> None:
        for number in range(20):
            while not (tmp_path / f"got{number}").exists():
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=signals, daemon=True)
    thread.start()
    result, out = job(mpirun, program)
    *lines, last = out.splitlines()
    assert (result.returncode, last) == (0, f"last {len(lines)}")
    assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))


def test_what_was_there_before_is_there_again(mpirun: Launcher) -> None:
    """Handlers of signals, the descriptor that they wake, and the thread's own loop."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    with socket.socket() as wakes:
        wakes.setblocking(False)
        wakeup = signal.set_wakeup_fd(wakes.fileno())
        mine = [signal.getsignal(number) for number in numbers]
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        assert job(mpirun, "")[0].returncode == 0
        assert [signal.getsignal(number) for number in numbers] == mine
        assert signal.set_wakeup_fd(wakeup) == wakes.fileno()
        assert asyncio.get_event_loop() is loop
        asyncio.set_event_loop(None)
        loop.close()


def test_nobody_can_come_once_all_ranks_have(mpirun: Launcher) -> None:
    program = """
        import os, psutil, socket
        (connection,) = psutil.Process(os.getppid()).net_connections("tcp")
        print(os.strerror(socket.socket().connect_ex(connection.raddr)))
    """
    assert job(mpirun, program, nproc=2)[1] == "Connection refused\n" * 2


def test_inside_a_running_loop(mpirun: Launcher) -> None:
    """As in a cell of a notebook. The loop goes on afterwards."""

    async def cell() -> str:
        me = asyncio.current_task()
        result, out = job(mpirun, "print('done')", nproc=2)
        assert result.returncode == 0
        assert asyncio.current_task() is me
        await asyncio.wait_for(asyncio.sleep(0.01), 30)
        return out

    assert asyncio.run(cell()) == "done\ndone\n"


def test_outside_of_the_main_thread(mpirun: Launcher) -> None:
    """Nobody catches signals there."""
    results: list[tuple[JobResult, str]] = []
    thread = threading.Thread(target=lambda: results.append(job(mpirun, "print('done')")))
    thread.start()
    thread.join(60)
    assert [(result.returncode, out) for result, out in results] == [(0, "done\n")]


class Broken(io.StringIO):
    """Breaks at the first line."""

    def write(self, text: str) -> int:
        raise OSError("no more")


@pytest.mark.parametrize("code", [0, 3])
def test_an_mpirun_that_does_not_end(mpirun: Launcher, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As on a node with a long queue for its cores: the ranks say how the job has ended."""
    monkeypatch.setenv("LINGERS", "1")
    result, _ = job(mpirun, f"raise SystemExit({code})", nproc=2)
    assert result.returncode == code
    assert bool(result.message) == bool(code)


def test_an_error_of_our_own_ends_the_job(mpirun: Launcher) -> None:
    """And is raised, where asyncio would write it to a log, or take it for one of the connection's."""
    with pytest.raises(OSError, match="no more"):
        job(mpirun, "while True: print('y' * 1000)", out=Broken())


HALF_OPEN = """
import json, os, socket, sys, time
sys.path[:0] = {path!r}
from torchmpi_plugin.node.calling import call
job = json.loads(os.environ["MPIPLUS_JOB"])
connection = call(job["addresses"], job["port"], job["secret"], 30)
{says}
sys.exit(5)
"""
STAYS = "time.sleep(1000)"
BEGINS = r"connection.sendall(b'J\0\0\0\xff{')"
TOO_LATE, ENDED = "not all ranks have come up within 1 s", "the ranks did not come up (mpirun: exit code 5)"


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (STAYS, TOO_LATE),
        (f"{BEGINS}; connection.shutdown(socket.SHUT_WR); {STAYS}", TOO_LATE),
        (r"connection.sendall(b'J\0\0\0\x02{}' * 3); connection.recv(1)", ENDED),  # turned away
        (r"connection.sendall(b'J\xff\xff\xff\xff{}'); connection.recv(1)", ENDED),
        ("", ENDED),
    ],
)
def test_a_supervisor_that_says_half_a_word(tmp_path: Path, says: str, problem: str) -> None:
    program = HALF_OPEN.format(path=[str(Path(__file__).parents[2]), *sys.path], says=says)
    mpirun = launcher(tmp_path / "mpirun", f"#!{sys.executable}\n{program}")
    result, out = job(mpirun, "print('runs')", start_timeout=1.0 if problem is TOO_LATE else 60.0)
    assert problem in result.message, result
    assert (out, bool(result.returncode)) == ("", True)


def test_the_same_traceback_of_several_ranks_stands_once(mpirun: Launcher) -> None:
    """With the ranks' own numbers in it, and in a chain; another one stands beside it, and so do lines after it."""
    program = """
        import os, sys, traceback
        rank = os.environ["RANK"]
        def load(what):
            raise KeyError(what)
        try:
            try:
                load(f"of rank {rank}" if rank != "3" else "another")
            except KeyError:
                raise ValueError("no such batch")
        except ValueError:
            traceback.print_exc()
        print("went on", rank, file=sys.stderr)
    """
    result, out = job(mpirun, program, 4, prefix=True)
    assert result.returncode == 0, out
    first, *_ = re.findall(r"KeyError: 'of rank (\d)'", out)
    others = ", ".join(rank for rank in "012" if rank != first)
    assert f"mpiplus run: ranks {others}: the same error as rank {first}'s above\n" in out, out
    counts = {"KeyError: 'of rank": 1, "KeyError: 'another'": 1, "During handling": 2, "no such batch": 2, "went on": 4}
    assert {words: out.count(words) for words in counts} == counts, out


def test_what_follows_a_known_traceback_is_shown_in_order() -> None:
    """Empty lines too, which might have led to the next one of a chain, and all of one that is cut off."""
    error = b"Traceback (most recent call last):\n  File x\nKeyError: 1\n"
    after = [b"\n", b"\n", b"next\n", b"50%\r", b"half a line", error[:45], error[45:60], b"\n", error[:40], b" \n"]
    known = Tracebacks()
    assert known.shown(0, error) == error
    assert known.shown(1, error) == b""
    shown = [known.shown(1, piece) for piece in after]
    shown += [known.released(at_once=False).get(1, b""), known.released(at_once=False).get(1, b"")]
    assert b"".join(shown) == b"".join(after)
    assert not known.holding
    assert known.others() == "mpiplus run: rank 1: the same error as rank 0's above\n"


@pytest.mark.parametrize("seconds", [0, 3], ids=["at the end", "while its rank goes on"])
def test_a_traceback_that_does_not_end_is_shown(mpirun: Launcher, seconds: int) -> None:
    program = f"""
        import sys, time
        sys.stderr.write('Traceback (most recent call last):\\n  File cut off')
        time.sleep({seconds})
        print("later", flush=True)
    """
    _, out = job(mpirun, program, 2, prefix=True)
    assert out.count("  File cut off") == 2, out
    assert not seconds or out.rindex("File cut off") < out.index("later"), out


HEADER = struct.Struct(">cI")
#: Its MPI's daemon is gone at the first look, as where MPI ends the job: no word of that until it is sure.
SUPERVISOR = """
import os, socket, sys
from torchmpi_plugin.jobs import supervisor
from torchmpi_plugin.jobs.loop import run
supervisor.LOOK_SECONDS, supervisor.SURE_SECONDS = 0, 100
supervisor.Daemon.has_died = lambda self: True
guard_gone, keep = os.pipe()
watching = supervisor.Supervisor(guard_gone, supervisor.Daemon(os.getppid()))
sys.exit(run(watching.run(socket.socket(fileno=int(sys.argv[1])), {})))
"""
JOB = {
    "command": ["sleep", "1000"],
    "cwd": "/",
    "stdout": None,
    "stderr": None,
    "grace": 1,
    "fields": {"rank": 0},
    "error_file": None,
}
VARIABLES = {"defaults": {}, "inherited": {}, "own": {}}


class Talk:
    """A supervisor, and this end of its connection."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            other = socket.create_connection(server.getsockname())
            self.connection, _ = server.accept()
        self.connection.settimeout(30)
        words = [sys.executable, "-c", SUPERVISOR, str(other.fileno())]
        self.process = subprocess.Popen(words, pass_fds=[other.fileno()])
        other.close()
        assert json.loads(self.hear()) == {}  # who it is

    def say(self, *messages: object) -> None:
        """In one piece."""
        words = [json.dumps(message).encode() for message in messages]
        self.connection.sendall(b"".join(HEADER.pack(b"J", len(word)) + word for word in words))

    def hear(self, expected: bytes = b"J") -> bytes:
        kind, length = HEADER.unpack(self.connection.recv(HEADER.size, socket.MSG_WAITALL))
        assert kind == expected
        return self.connection.recv(length, socket.MSG_WAITALL)


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.connection.close()
    made.process.kill()
    made.process.wait(20)


def test_an_order_that_comes_together_with_the_job(talk: Talk) -> None:
    """One read may bring both; a signal must not be lost in it."""
    talk.say({**JOB, **VARIABLES}, {"signal": 15})
    ended = {"event": "ended", "code": 143, "signal": 15, "by_mpi": False, "error": ""}
    assert json.loads(talk.hear()) == ended
    assert json.loads(talk.hear()) == {"event": "told"}
    talk.say({"dismissed": True})
    assert talk.process.wait(30) == 143


@pytest.mark.parametrize("word", [{}, {"signal": 15}, None])
def test_a_launcher_that_has_no_job(talk: Talk, word: dict | None) -> None:
    """Or ends before it has said one."""
    if word is None:
        talk.connection.close()
    else:
        talk.say(word)
    assert talk.process.wait(30) == 1


def test_what_every_rank_imports_brings_no_loop() -> None:
    """A guard only waits, and there is one for each rank."""
    loaded = printed(
        "import sys, torchmpi_plugin.jobs.guard, torchmpi_plugin.node.calling; print(*sys.modules)"
    ).split()
    assert not {"asyncio", "psutil", "torch"} & set(loaded)
