"""The wire protocol that makes an MPI world of processes which MPI did not start, spoken by plain sockets."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest
import strangers

from torchmpi_plugin.lifecycle.bootstrap import process_mapping
from torchmpi_plugin.node import calling
from torchmpi_plugin.node.processes import python_command

SECRET = "0123456789abcdef"
#: Fewer than the connections that a server lets wait.
DESCRIPTORS = 40
MEMORY_GROWTH = 64 << 20


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


class Running:
    def __init__(self, size: int, seconds: float) -> None:
        self.process = subprocess.Popen(
            python_command("from torchmpi_plugin.lifecycle.pmi_server import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=limit_descriptors,  # noqa: PLW1509 (one thread)
        )
        job = {"address": "127.0.0.1", "size": size, "secret": SECRET, "mapping": "(vector,(0,1,2))"}
        self.process.stdin.write(json.dumps({**job, "seconds": seconds}) + "\n")
        self.process.stdin.close()
        self.port = int(self.process.stdout.readline())
        self.process.stdout.close()

    def ended(self) -> bool:
        return self.process.wait(20) == 0


class Client:
    def __init__(self, server: Running, greeting: str, secret: str = SECRET) -> None:
        self.socket = calling.call(["127.0.0.1"], server.port, secret, 30)
        self.socket.settimeout(20)
        self.lines = self.socket.makefile("r")
        self.send(greeting)

    def send(self, line: str) -> None:
        self.socket.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(line)
        return self.answer()

    def answer(self) -> str:
        """The next line; none if the server has closed the connection."""
        try:
            return self.lines.readline().strip()
        except ConnectionResetError:
            return ""

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running(2, 30)
    yield running
    running.process.kill()
    running.process.wait(20)


def both(server: Running) -> tuple[Client, Client]:
    first, second = (Client(server, f"{rank}") for rank in range(2))
    return first, second


def test_what_mpi_init_and_finalize_ask(server: Running) -> None:
    first, second = both(server)
    assert first.ask("cmd=init pmi_version=1 pmi_subversion=1").endswith("pmi_subversion=1 rc=0")
    name = first.ask("cmd=get_my_kvsname").partition("kvsname=")[2].split()[0]
    assert name == second.ask("cmd=get_my_kvsname").partition("kvsname=")[2].split()[0]
    assert first.ask("cmd=get_universe_size") == "cmd=universe_size size=2 rc=0"
    assert first.ask(f"cmd=get kvsname={name} key=PMI_process_mapping").endswith("value=(vector,(0,1,2))")
    assert "rc=-1" in second.ask(f"cmd=get kvsname={name} key=address-0")
    assert "rc=0" in first.ask(f"cmd=put kvsname={name} key=address-0 value=a=b#c")
    first.send("cmd=barrier_in")
    assert second.ask("cmd=barrier_in") == first.answer() == "cmd=barrier_out rc=0"
    assert second.ask(f"cmd=get kvsname={name} key=address-0").endswith("value=a=b#c")
    assert "rc=-1" in first.ask("cmd=spawn nprocs=2")
    for client in (first, second):
        assert client.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
        client.close()
    assert server.ended()


@pytest.mark.parametrize("greeting", ["0", "2", "x"])
def test_a_rank_that_cannot_be_is_turned_away(server: Running, greeting: str) -> None:
    """One that is there already, one too many, none; the others are not disturbed."""
    first = Client(server, "0")
    assert first.ask("cmd=get_appnum") == "cmd=appnum appnum=0 rc=0"
    assert Client(server, greeting).ask("cmd=get_maxes") == ""
    second = Client(server, "1")
    first.send("cmd=barrier_in")
    assert second.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"


@pytest.mark.parametrize("attack", strangers.ATTACKS)
def test_strangers_cannot_stop_it(server: Running, attack: str) -> None:
    """They come before the ranks, between them, and after them, and stay; all goes on, in bounded memory."""
    before = strangers.peak_memory(server.process.pid)
    connections = strangers.ATTACKS[attack](server.port)
    first = Client(server, "0")
    connections += strangers.ATTACKS[attack](server.port)
    second = Client(server, "1")
    assert second.ask("cmd=get_appnum") == "cmd=appnum appnum=0 rc=0"
    assert not strangers.is_listening(server.process.pid)
    with contextlib.suppress(ConnectionRefusedError):
        connections += strangers.ATTACKS[attack](server.port)
    first.send("cmd=barrier_in")
    assert second.ask("cmd=barrier_in") == first.answer() == "cmd=barrier_out rc=0"
    assert strangers.peak_memory(server.process.pid) - before < MEMORY_GROWTH
    for client in (first, second, *connections):
        client.close()
    assert server.ended()


def test_descriptors_that_ranks_have_taken() -> None:
    """Nobody can be turned away for more room then. The server waits; it does not spin."""
    server = Running(2 * DESCRIPTORS, 30)
    clients = []
    with contextlib.suppress(OSError):
        while True:
            connection = calling.call(["127.0.0.1"], server.port, SECRET, 0)
            clients.append(connection)
            connection.sendall(f"{len(clients)}\n".encode())
    assert DESCRIPTORS // 2 < len(clients) < DESCRIPTORS
    start, times = time.monotonic(), psutil.Process(server.process.pid).cpu_times
    used = sum(times()[:2])
    time.sleep(2)
    assert sum(times()[:2]) - used < (time.monotonic() - start) / 2
    server.process.kill()
    server.process.wait(20)
    for client in clients:
        client.close()


@pytest.mark.parametrize("when", ["during", "before"])
def test_a_rank_that_dies_does_not_leave_the_others_in_mpi_init(server: Running, when: str) -> None:
    first, second = both(server)
    assert "rc=0" in second.ask("cmd=init pmi_version=1 pmi_subversion=1")
    if when == "during":
        first.send("cmd=barrier_in")
        second.close()
    else:
        second.close()
        first.send("cmd=barrier_in")
    assert first.answer() == ""
    assert server.ended()


def test_it_does_not_wait_for_ever() -> None:
    server = Running(2, 2)  # until then a slow client may connect
    client = Client(server, "0")
    assert client.answer() == ""
    assert server.ended()


def test_process_mapping() -> None:
    assert process_mapping(["a"] * 4) == "(vector,(0,1,4))"
    assert process_mapping(["a", "a", "b", "b", "b"]) == "(vector,(0,1,2),(1,1,3))"
    assert process_mapping(["a", "b", "a"]) == "(vector,(0,1,1),(1,1,1),(0,1,1))"
