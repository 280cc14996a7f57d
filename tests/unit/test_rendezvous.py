"""What is said before ranks meet, and by whom."""

from __future__ import annotations

import re
import resource
import socket
import threading
import time
from datetime import timedelta

import pytest

from torchmpi_plugin.errors import DistBackendError
from torchmpi_plugin.lifecycle import rendezvous
from torchmpi_plugin.node import lookups
from torchmpi_plugin.store import tcp_store


@pytest.fixture
def nobody_knows(monkeypatch):
    """No node has a name that can be found; returns the list of names that were looked up."""
    asked: list[str] = []

    def refuse(name, *_):
        asked.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(lookups, "_RESOLVE_SECONDS", 0.0)
    return asked


class TestGiven:
    """What the user says, in arguments and variables."""

    def test_nothing(self) -> None:
        assert rendezvous._given("env://", {}) == (None, None, None, None)
        assert rendezvous._given("env://", {"RANK": "", "MASTER_ADDR": "", "MASTER_PORT": ""}) == (None,) * 4

    def test_arguments_come_before_variables(self) -> None:
        variables = {"RANK": "abc", "WORLD_SIZE": "9", "MASTER_PORT": "0"}
        assert rendezvous._given("env://?rank=1&world_size=2", variables) == (1, 2, None, 0)

    def test_variables_that_do_not_count(self) -> None:
        variables = {"RANK": "abc", "WORLD_SIZE": "abc", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        assert rendezvous._given("mpi://", variables, ranks=False) == (None, None, "127.0.0.1", 29500)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("RANK", "1.5"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "http")],
    )
    def test_variables_that_are_wrong(self, name: str, value: str) -> None:
        with pytest.raises(ValueError, match=f"the variable {name} must be an integer, .*, not '{value}'"):
            rendezvous._given("env://", {name: value})

    def test_arguments_that_are_wrong(self) -> None:
        with pytest.raises(ValueError, match="init_process_group: world_size must be an integer, 1 or more, not 'x'"):
            rendezvous._given("mpi://?world_size=x", {})

    @pytest.mark.parametrize("host", ["nosuchhost.invalid", "a..b", "x" * 64])
    def test_a_host_that_nobody_knows(self, host: str, monkeypatch) -> None:
        monkeypatch.setattr(lookups, "_RESOLVE_SECONDS", 0.0)
        with pytest.raises(ValueError, match=f"the variable MASTER_ADDR is '{re.escape(host)}', a name that is not"):
            rendezvous._given("env://", {"MASTER_ADDR": host})

    def test_a_host_that_is_known_a_moment_later(self, nobody_knows, monkeypatch) -> None:
        refuse = socket.getaddrinfo
        monkeypatch.setattr(lookups, "_RESOLVE_SECONDS", 60.0)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *words: refuse(*words) if len(nobody_knows) < 2 else [])
        assert rendezvous._given("env://", {"MASTER_ADDR": "node1"}).address == "node1"
        assert nobody_knows == ["node1", "node1"]


def test_the_store_has_room_for_all_ranks() -> None:
    """1,024 open files are a usual limit; the ranks beyond it would get "Connection reset by peer"."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks, few = 300, 200
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        server, _ = tcp_store._serve(tcp_store.Endpoint("", 0), ranks, timedelta(seconds=5), True)
        assert server is not None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(2 * ranks + few, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class TestRanks:
    def everybody(self, *ranks: int) -> list[tcp_store._Process]:
        return [tcp_store._Process(rank, "node", f"node{number}", 100 + number) for number, rank in enumerate(ranks)]

    def test_each_once(self) -> None:
        tcp_store._check_ranks(self.everybody(2, 0, 1))

    def test_twice(self) -> None:
        wanted = (
            r"ranks 0, 1 given to several processes: rank 0 to MPI rank 0 \(process 100 on node0\), rank 1 to MPI rank "
            r"1 \(process 101 on node1\), rank 1 to MPI rank 2 .*, rank 0 to MPI rank 4 \(process 104 on node4\)\. Give"
        )
        with pytest.raises(DistBackendError, match=wanted):
            tcp_store._check_ranks(self.everybody(0, 1, 1, 3, 0))

    def test_many(self) -> None:
        with pytest.raises(DistBackendError, match=r"MPI rank 7 \(process 107 on node7\), and 92 more\. Give"):
            tcp_store._check_ranks(self.everybody(*[0] * 100))


class TestShortLookups:
    """glibc keeps each thread's limits where this looks for them."""

    def limits(self) -> tuple[int, int]:
        state = lookups._resolver_state()
        if state is None:
            pytest.skip("a C library without __res_state")
        return state.seconds, state.attempts

    def test_the_state_is_what_it_is_taken_for(self) -> None:
        seconds, attempts = self.limits()
        assert 1 <= seconds <= 30  # glibc's own bounds
        assert 1 <= attempts <= 5

    def test_for_addresses_and_on_this_thread_only(self) -> None:
        before = self.limits()
        others: list[tuple[int, int]] = []
        for host in ("127.0.0.1", "::1", "localhost"):
            with lookups.lookups_are_short(host):
                assert self.limits() == (1, 1)
                thread = threading.Thread(target=lambda: others.append(self.limits()))
                thread.start()
                thread.join()
            assert self.limits() == before
        assert others == [before] * 3

    def test_not_where_the_name_is_needed(self) -> None:
        before = self.limits()
        with lookups.lookups_are_short("node1"):
            assert self.limits() == before

    def test_what_fails_inside_leaves_nothing_behind(self) -> None:
        before = self.limits()
        with pytest.raises(RuntimeError), lookups.lookups_are_short("127.0.0.1"):
            raise RuntimeError
        assert self.limits() == before

    def test_another_c_library(self, monkeypatch) -> None:
        monkeypatch.setattr(lookups.ctypes, "CDLL", lambda name: object())
        with lookups.lookups_are_short("127.0.0.1"):
            pass
