"""What is said before ranks meet, and by whom."""

from __future__ import annotations

import resource
import socket
import threading
import time
from datetime import timedelta

import pytest

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
    return asked


def test_a_name_that_is_known_a_moment_later(nobody_knows, monkeypatch) -> None:
    refuse = socket.getaddrinfo
    monkeypatch.setattr(lookups, "_RESOLVE_SECONDS", 60.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: refuse(*words) if len(nobody_knows) < 2 else [])
    assert lookups.why_unknown("node1") == ""
    assert nobody_knows == ["node1", "node1"]


def test_the_store_has_room_for_all_ranks() -> None:
    """1,024 open files are a usual limit; the ranks beyond it would get "Connection reset by peer"."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks, few = 300, 200
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        server, _ = tcp_store._serve("", 0, ranks, timedelta(seconds=5), True)
        assert server is not None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(2 * ranks + few, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
