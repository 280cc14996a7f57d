"""The thread in C that answers, in many processes at once, without torch and MPI."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from plain_python import printed

from torchmpi_plugin.status import asking, files
from torchmpi_plugin.status.asking import Rank, Told, _understood, ask, ask_job
from torchmpi_plugin.status.screen import attention_of, late_of, screen_of

RANKS = 24
SERVERS = """
import json, os, sys, time
from torchmpi_plugin import _shim_int
from torchmpi_plugin.status import files
lib, ffi = _shim_int.lib, _shim_int.ffi
size, busy = int(sys.argv[1]), sys.argv[2] == "busy"
for rank in range(size):
    if os.fork() == 0:
        about = {"job": "7", "world_rank": rank, "world_size": size, "node_rank": 0, "host": "h", "pid": os.getpid(),
                 "program": "train.py", "attempt": "0", "since": time.time()}
        listening = files.listen_at(files.socket_of("7", rank)).detach()
        assert lib.mpp_status_start(listening, json.dumps(about)[1:-1].encode(), -1, 34)
        group = lib.mpp_group_new(0, rank, size, 0, 1, 1)
        assert lib.mpp_group_describe(group, json.dumps({"name": "g", "ranks": list(range(size))})[1:-1].encode())
        print(rank, flush=True)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if not busy:
                time.sleep(1)
        os._exit(0)
os.wait()
"""


@contextlib.contextmanager
def servers(directory: Path, size: int, how: str = "idle") -> Iterator[None]:
    environment = {**os.environ, "MPIPLUS_STATUS_DIRECTORY": str(directory)}
    command = [sys.executable, "-c", SERVERS, str(size), how]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        for _ in range(size):
            assert process.stdout.readline()
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPIPLUS_STATUS_DIRECTORY", str(tmp_path / "sockets"))
    return tmp_path / "sockets"


def test_ranks_that_compute(directory: Path) -> None:
    """All answer at once, where each wants a core for itself."""
    with servers(directory, RANKS, "busy"):
        ranks = ask_job(files.all_sockets())
    assert [rank.rank for rank in ranks if rank.answer] == list(range(RANKS))
    assert screen_of(ranks, ranks, 1.0).count("has called nothing yet") == RANKS


def test_a_process_without_descriptors_answers_once_it_has_some(directory: Path) -> None:
    with servers(directory, 1):
        (server,) = files.all_sockets()
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        caller = threading.Thread(target=ask, args=([server], "status", 20))  # for whom the kernel may have kept one
        caller.start()
        time.sleep(0.5)  # it finds none for another one, again and again
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        assert ask([server], "status", 20)
        caller.join()


@pytest.mark.parametrize("length", [107, 108, 250])
def test_a_path_longer_than_a_sockets_may_be(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """The kernel takes 107 bytes; a rank below a longer one answers all the same, and no descriptor is left open."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        directory = Path(short)
        monkeypatch.setenv("MPIPLUS_STATUS_DIRECTORY", str(directory))
        rest = length - len(str(files.socket_of("7", 0)))
        assert rest > 2
        for number in range(rest, 0, -100):  # no name may be longer than 255 bytes
            directory /= "d" * (min(number, 100) - 1)
        directory.mkdir(parents=True, mode=0o700)
        monkeypatch.setenv("MPIPLUS_STATUS_DIRECTORY", str(directory))
        assert len(str(files.socket_of("7", 0))) == length
        with servers(directory, 1):
            (each,) = files.all_sockets()
            before = os.listdir("/proc/self/fd")
            assert json.loads(ask([each], "status", 5.0)[0])["groups"][0]["name"] == "g"
            assert os.listdir("/proc/self/fd") == before


def test_what_it_does_not_understand(directory: Path) -> None:
    """No answer, and the next who asks gets one."""
    with servers(directory, 1):
        sockets = files.all_sockets()
        assert ask(sockets, "what", 5.0) == ask(sockets, "x" * 1000, 5.0) == ask(sockets, "", 5.0) == {}
        assert ask(sockets, "stacks", 5.0) == {}  # there is no file for them
        assert json.loads(ask(sockets, "status", 5.0)[0])["groups"][0]["name"] == "g"
        assert ask(sockets, "others status", 8.0) == {}  # no Python answers
        assert 0 in ask(sockets, "status", 5.0)


def test_a_rank_that_somebody_else_asks(directory: Path) -> None:
    """Its thread waits for Python, for longer than a rank gets that is asked from memory; it is not called silent."""
    with servers(directory, 1):
        sockets = files.all_sockets()
        other = threading.Thread(target=ask, args=(sockets, "others status", 8.0))
        other.start()
        time.sleep(0.3)
        began = time.monotonic()
        assert ask_job(sockets)[0].answer is not None
        assert time.monotonic() - began > asking.MEMORY_SECONDS
        other.join()


def group(name: str, **more: object) -> dict:
    plain = {"name": name, "ranks": [0, 1, 2], "rank": 0, "size": 3, "calls": 5, "bytes": 40, "number": 5, "peer": -1}
    plain |= {"operation": "all_reduce", "length": 8, "inside": False, "pending": 0, "begun_ago": 9.0, "ended_ago": 8.9}
    return {**plain, "in_calls": 1.0, "waited": 0.5, "missing": [], "late": {}, **more}


def test_a_socket_of_a_process_that_cannot_be_seen(directory: Path) -> None:
    """It is another container's, whose process numbers are its own: left alone for as long as somebody listens."""
    path = files.make_directory() / "7-abcd.0.4194305.sock"  # a number above the kernel's largest
    with socket.socket(socket.AF_UNIX) as listening:
        with files.address_of(path) as address:
            listening.bind(address)
        listening.listen()
        assert [each.path for each in files.all_sockets()] == [path]
    assert (files.all_sockets(), path.exists()) == ([], False)


LATE = """
import json, threading
from torchmpi_plugin import _shim_int
from torchmpi_plugin.status import asking, files
lib, ffi = _shim_int.lib, _shim_int.ffi
listening = files.listen_at(files.socket_of("7-abcd", 0)).detach()
assert lib.mpp_status_start(listening, b'"a": 1', -1, 34)
def asks():
    told.append(asking.ask(files.all_sockets(), "dump", 20.0))
def asked():
    request = ffi.new("char[]", lib.MPP_REQUEST)
    while not (number := lib.mpp_status_wanted(request)) or not ffi.string(request):
        pass
    return number
told = []
asks_first = threading.Thread(target=asks); asks_first.start()
first = asked()
asks_first.join()
asks_second = threading.Thread(target=asks); asks_second.start()
lib.mpp_status_give(first, b"late")
second = asked()
lib.mpp_status_give(first, b"later")
lib.mpp_status_give(second, b"in time")
asks_second.join()
assert told == [{}, {0: "in time"}], told
"""


def test_an_answer_that_comes_late(directory: Path) -> None:
    """Nobody gets it who has asked something else meanwhile."""
    printed(LATE)


CLOSED = """
import os
from torchmpi_plugin import _shim_int
from torchmpi_plugin.status import files
assert _shim_int.lib.mpp_status_start(files.listen_at(files.socket_of("7-abcd", 0)).detach(), b'"a": 1', -1, 34)
os.closerange(3, 1000)
_shim_int.lib.mpp_status_stop()
"""


def test_a_program_that_has_closed_the_socket(directory: Path) -> None:
    """Its end waits for nobody."""
    printed(CLOSED)


def test_the_screen_of_the_last_interval() -> None:
    """Shares of time are of that interval; who is late is known for the eye."""
    about = {"job": "7-abcd", "world_size": 3, "host": "h", "program": "t.py", "attempt": "0"}
    about["since"] = time.time() - 100
    before = [Rank(0, about, groups=[group("a", in_calls=1.0, waited=0.0)])]
    now = [Rank(0, about, groups=[group("a", in_calls=2.0, waited=0.5, inside=True, missing=[2], begun_ago=30.0)])]
    assert re.search(r" 50% +25% ", screen_of(now, before, 2.0, recent=True))
    assert re.search(r" 2% +0% ", screen_of(now, before, 2.0))
    assert late_of(now) == {2}


@pytest.mark.parametrize("answer", ["", "[]", '{"groups": []}', '{"groups', "\\ud800"])
def test_an_answer_that_is_none(directory: Path, answer: str) -> None:
    """The others' are shown all the same."""
    ranks = [_understood(Told(0, 1, answer)), Rank(1, {"host": "h"}, groups=[group("a")])]
    assert ranks[0].answer is None
    assert len(attention_of(ranks)) == (1 if answer else 0)
