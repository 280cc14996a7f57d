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


def test_short_lookups(monkeypatch) -> None:
    """Of addresses, on this thread only; glibc keeps each thread's limits where this looks for them."""

    def limits() -> tuple[int, int]:
        state = lookups._resolver_state()
        if state is None:
            pytest.skip("a C library without __res_state")
        return state.seconds, state.attempts

    before, others = limits(), []
    assert 1 <= before[0] <= 30 and 1 <= before[1] <= 5  # glibc's own bounds
    for host in ("127.0.0.1", "::1", "localhost"):
        with pytest.raises(LookupError), lookups.lookups_are_short(host):
            assert limits() == (1, 1)
            thread = threading.Thread(target=lambda: others.append(limits()))
            thread.start()
            thread.join()
            raise LookupError
        assert limits() == before
    assert others == [before] * 3
    with lookups.lookups_are_short("node1"):  # the name is needed
        assert limits() == before
    monkeypatch.setattr(lookups.ctypes, "CDLL", lambda name: object())  # another C library
    with lookups.lookups_are_short("127.0.0.1"):
        pass
