"""A rank's side of the talk with the launcher of `mpiplus run`."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from plain_python import printed

HEADER = struct.Struct(">cI")
SUPERVISOR = """
import os, socket, sys
from torchmpi_plugin.jobs.loop import run
from torchmpi_plugin.jobs.supervisor import Daemon
from torchmpi_plugin.jobs.supervisor import Supervisor
guard_gone, keep = os.pipe()
sys.exit(run(Supervisor(guard_gone, Daemon(os.getppid())).run(socket.socket(fileno=int(sys.argv[1])), {})))
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
