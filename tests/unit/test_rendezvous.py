"""What is said before ranks meet, and by whom; how they meet over torch's store, where they are threads here."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType

import pytest
import torch.distributed as dist

from torchmpi_plugin.errors import DistBackendError
from torchmpi_plugin.lifecycle import bootstrap
from torchmpi_plugin.node import lookups
from torchmpi_plugin.store import checkin, tcp_store
from torchmpi_plugin.store.checkin import CheckIn


def test_a_name_that_is_known_a_moment_later(monkeypatch) -> None:
    asked: list[str] = []

    def look_up(name, *_):
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(lookups, "_RESOLVE_SECONDS", 60.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert lookups.why_unknown("node1") == ""
    assert asked == ["node1"] * 3


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


def test_processes_that_open_mpi_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the arguments the launcher's own are left out; no launcher of ours can start what Ray starts."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train", "--local_rank=1", "--local-rank=1", "--lr=2"])
    text = bootstrap._open_mpi_text
    assert "python -m train --lr=2, or" in text("Open MPI 5.0.11", 2)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    told = text("Open MPI 5.0.11", 2)
    assert "Ray starts its own workers" in told
    assert "MPICH" in told
    assert "mpirun" not in told
    assert "mpiplus run" not in told


def test_a_server_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is told of its job."""

    class Ended(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, _: list[str], **how: object) -> None:
            super().__init__([sys.executable, "-c", ""], **how)  # type: ignore[call-overload]
            super().wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(DistBackendError, match="the server on rank 0 did not start"):
        bootstrap.serve(["a", "a"], timedelta(seconds=5))


SIZE = 5
SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=30)


def meet(store: dist.Store, rank: int, value: str, timeout: timedelta = LONG) -> list[str] | str:
    """What the rank heard; the error's text, if that is what came."""
    try:
        return CheckIn(store, "test", rank, SIZE).gather("values", value, timeout, "the test")
    except DistBackendError as error:
        return str(error)


def all_of(store: dist.Store, values: dict[int, str], timeout: timedelta = LONG) -> list[list[str] | str]:
    with ThreadPoolExecutor(SIZE) as ranks:
        return list(ranks.map(lambda rank: meet(store, rank, values[rank], timeout), values))


@pytest.mark.parametrize("missing", [0, 3])
def test_who_did_not_come_is_named(missing: int) -> None:
    heard = all_of(dist.HashStore(), {rank: "" for rank in range(SIZE) if rank != missing}, SHORT)
    assert all(f"rank {missing} did not come" in text for text in heard), heard


def test_who_comes_too_late_hears_nothing() -> None:
    """Else it would go on alone: rank 0 has told its program of a failure."""
    store = dist.HashStore()
    all_of(store, {rank: "" for rank in range(SIZE - 1)}, SHORT)
    assert "gave up" in meet(store, SIZE - 1, "", SHORT)


def test_an_earlier_meeting_of_that_name_is_not_this_one() -> None:
    """As where a store outlives a group whose making failed."""
    store = dist.HashStore()
    all_of(store, {rank: f"before, {rank}" for rank in range(SIZE)})
    values = {rank: f"now, {rank}" for rank in range(1, SIZE)}
    assert all("gave up" in text for text in all_of(store, values, SHORT))
    assert all_of(store, {0: "now, 0", **values}) == [["now, 0", *values.values()]] * SIZE


def test_who_has_ended_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(checkin, "_FIRST_LOOK", 0.1)
    gone = DistBackendError("the test: rank 3 has ended")
    for rank in (0, 1):
        start = time.monotonic()
        with pytest.raises(DistBackendError, match="rank 3 has ended"):
            CheckIn(dist.HashStore(), "test", rank, SIZE, lambda _: gone).gather("values", "", LONG, "the test")
        assert time.monotonic() - start < LONG.total_seconds() / 2


def test_who_has_come_and_ended_is_no_loss(monkeypatch) -> None:
    """Its last message may arrive between a look at the store and one at its process."""
    monkeypatch.setattr(checkin, "_FIRST_LOOK", 0.1)
    store = dist.HashStore()

    def look(_: str) -> DistBackendError:
        CheckIn(store, "test", 1, 2).arrive("values", "of 1")
        return DistBackendError("rank 1 has ended")

    assert CheckIn(store, "test", 0, 2, look).gather("values", "of 0", LONG, "the test") == ["of 0", "of 1"]


def test_the_store_is_asked_where_no_thread_can_be_started(monkeypatch) -> None:
    """As Python 3.12.1 has it from atexit on, where a rank asks who else has come to its end."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    one, other = (CheckIn(store, "test", rank, 2) for store in [dist.HashStore()] for rank in (0, 1))
    monkeypatch.setattr(checkin.threading.Thread, "start", refuse)
    one.leave(7)
    assert other.departed() == {0: 7}
    assert checkin.wait_for_threads(0)
