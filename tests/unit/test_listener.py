"""Who listens and who calls believe each other only once both have shown that they know the job's secret."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from torchmpi_plugin.jobs import supervisor
from torchmpi_plugin.jobs.loop import run
from torchmpi_plugin.node import calling, listener

SECRET = "0123456789abcdef"
# Nobody else's: a port that is free at the one must be free at the other.
HERE, THERE = "127.0.0.1", "127.{}.{}.{}".format(*random.sample(range(1, 255), 3))
JOB = b'J\x00\x00\x00\x1b{"command": ["touch", "x"]}'


class Desk:
    """A listener with a loop of its own; says "welcome" to whoever it lets in."""

    def __init__(self) -> None:
        self.welcomed: list[socket.socket] = []
        self.listener: listener.Listener
        self.opened = threading.Event()
        self.thread = threading.Thread(target=run, args=(self.serve(),))
        self.thread.start()
        assert self.opened.wait(20)

    async def welcome(self, connection: socket.socket) -> None:
        self.welcomed.append(connection)  # first: who has been told may look
        connection.sendall(b"welcome")

    async def serve(self) -> None:
        self.loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()
        self.listener = listener.Listener(SECRET, HERE, 1, self.welcome)
        self.opened.set()
        await self.stopping.wait()
        self.listener.close()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stopping.set)
        self.thread.join(20)
        for connection in self.welcomed:
            connection.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.stop()


class Impostor:
    """Listens at another address on the same port, and keeps what it hears."""

    def __init__(self, port: int, answer: Callable[[Impostor, socket.socket], None]) -> None:
        self.heard = b""
        self.port = port
        self.listener = socket.create_server((THERE, port))
        self.thread = threading.Thread(target=self.serve, args=(answer,), daemon=True)
        self.thread.start()

    def serve(self, answer: Callable[[Impostor, socket.socket], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                connection.settimeout(20)
                with connection, contextlib.suppress(OSError):
                    answer(self, connection)
                    while data := connection.recv(4096):
                        self.heard += data

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # or it would listen for as long as the thread waits in accept
        self.listener.close()


def sends_a_job(_: Impostor, connection: socket.socket) -> None:
    """What is run by supervisors that believe whoever answers."""
    connection.sendall(JOB)


def accepts_any_proof(impostor: Impostor, connection: socket.socket) -> None:
    connection.sendall(b"c" * 32)
    impostor.heard += connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(b"p" * 32 + JOB)


def reflects(impostor: Impostor, connection: socket.socket) -> None:
    """The caller's own proof in place of one of its own."""
    connection.sendall(b"c" * 32)
    impostor.heard += connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(impostor.heard[-32:] + JOB)


def passes_on(impostor: Impostor, connection: socket.socket) -> None:
    """What each side says, to the other one."""
    with socket.create_connection((HERE, impostor.port), timeout=20) as real:
        connection.sendall(real.recv(32, socket.MSG_WAITALL))
        impostor.heard += connection.recv(64, socket.MSG_WAITALL)
        real.sendall(impostor.heard)
        connection.sendall(real.recv(32, socket.MSG_WAITALL) + JOB)


IMPOSTORS = [sends_a_job, accepts_any_proof, reflects, passes_on]


def test_a_caller_who_does_not(desk: Desk) -> None:
    with pytest.raises(ConnectionError, match="turned away"):
        calling.call([HERE], desk.listener.port, "guess", 0)
    assert not desk.welcomed


def test_a_caller_with_the_proof_is_not_turned_away(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are at that moment, for want of room or as all have come; this one would not call again."""
    send, sent = desk.loop.sock_sendall, []

    async def closed_after_the_proof(connection: socket.socket, data: bytes) -> None:
        await send(connection, data)
        sent.append(data)
        if len(sent) == 2:
            desk.listener.close()

    monkeypatch.setattr(desk.loop, "sock_sendall", closed_after_the_proof)
    with calling.call([HERE], desk.listener.port, SECRET, 0) as connection:
        connection.settimeout(20)
        assert connection.recv(7, socket.MSG_WAITALL) == b"welcome"


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_the_next_address_is_tried(desk: Desk, impostor: Callable[[Impostor, socket.socket], None]) -> None:
    with contextlib.closing(Impostor(desk.listener.port, impostor)) as other:
        with calling.call([THERE, HERE], desk.listener.port, SECRET, 0) as connection:
            assert connection.getpeername()[0] == HERE
            connection.settimeout(20)
            assert connection.recv(7, socket.MSG_WAITALL) == b"welcome"
        assert len(desk.welcomed) == 1
        assert SECRET.encode() not in other.heard


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_a_supervisor_runs_nothing_for_an_impostor(
    desk: Desk, impostor: Callable[[Impostor, socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher cannot be reached; who can be is not believed."""
    monkeypatch.setattr(supervisor, "_CONNECT_SECONDS", 0)
    with contextlib.closing(Impostor(desk.listener.port, impostor)) as other:
        with pytest.raises(SystemExit, match="cannot connect to the launcher"):
            supervisor.connect({"addresses": [THERE], "port": other.port, "secret": SECRET})
        assert SECRET.encode() not in other.heard
