"""The wire protocol that makes an MPI world of processes which MPI did not start, spoken by plain sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchmpi_plugin
from torchmpi_plugin.bootstrap import process_mapping

SERVER = Path(torchmpi_plugin.__file__).with_name("pmi_server.py")
SECRET = "0123456789abcdef"


class Running:
    def __init__(self, size: int, seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        job = {"size": size, "secret": SECRET, "mapping": "(vector,(0,1,2))", "seconds": seconds}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.close()
        self.port = int(self.process.stdout.readline())
        self.process.stdout.close()

    def ended(self) -> bool:
        return self.process.wait(20) == 0


class Client:
    def __init__(self, server: Running, greeting: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
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
    first, second = (Client(server, f"{SECRET} {rank}") for rank in range(2))
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


def test_two_jobs_have_different_names(server: Running) -> None:
    """MPICH names shared memory after it."""
    other = Running(1, 30)
    try:
        mine, theirs = Client(server, f"{SECRET} 0"), Client(other, f"{SECRET} 0")
        assert mine.ask("cmd=get_my_kvsname") != theirs.ask("cmd=get_my_kvsname")
    finally:
        other.process.kill()
        other.process.wait(20)


@pytest.mark.parametrize("greeting", ["guess 1", f"{SECRET} 0", f"{SECRET} x", ""])
def test_strangers_are_turned_away(server: Running, greeting: str) -> None:
    """Without the secret, with a rank that is there already, without a rank; the others are not disturbed."""
    first = Client(server, f"{SECRET} 0")
    assert first.ask("cmd=get_appnum") == "cmd=appnum appnum=0 rc=0"
    assert Client(server, greeting).ask("cmd=get_maxes") == ""
    second = Client(server, f"{SECRET} 1")
    first.send("cmd=barrier_in")
    assert second.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"


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
    client = Client(server, f"{SECRET} 0")
    assert client.answer() == ""
    assert server.ended()


def test_process_mapping() -> None:
    assert process_mapping(["a"] * 4) == "(vector,(0,1,4))"
    assert process_mapping(["a", "a", "b", "b", "b"]) == "(vector,(0,1,2),(1,1,3))"
    assert process_mapping(["a", "b", "a"]) == "(vector,(0,1,1),(1,1,1),(0,1,1))"
