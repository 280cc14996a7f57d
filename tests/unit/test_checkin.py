"""Meetings over torch's store, of ranks that are threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchmpi_plugin.errors import DistBackendError
from torchmpi_plugin.store import checkin
from torchmpi_plugin.store.checkin import CheckIn

SIZE = 5
SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=30)


def meet(store: dist.Store, rank: int, value: str, timeout: timedelta = LONG) -> list[str] | str:
    """What the rank heard; the error's text, if that is what came."""
    try:
        return CheckIn(store, "test", rank, SIZE).gather("meeting", value, timeout, "the test")
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
            CheckIn(dist.HashStore(), "test", rank, SIZE, lambda _: gone).gather("meeting", "", LONG, "the test")
        assert time.monotonic() - start < LONG.total_seconds() / 2


def test_who_has_come_and_ended_is_no_loss(monkeypatch) -> None:
    """Its last message may arrive between a look at the store and one at its process."""
    monkeypatch.setattr(checkin, "_FIRST_LOOK", 0.1)
    store = dist.HashStore()

    def look(_: str) -> DistBackendError:
        CheckIn(store, "test", 1, 2).arrive("meeting", "of 1")
        return DistBackendError("rank 1 has ended")

    assert CheckIn(store, "test", 0, 2, look).gather("meeting", "of 0", LONG, "the test") == ["of 0", "of 1"]


def test_the_store_is_asked_where_no_thread_can_be_started(monkeypatch) -> None:
    """As Python 3.12.1 has it from atexit on, where a rank asks who else has come to its end."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    one, other = (CheckIn(store, "test", rank, 2) for store in [dist.HashStore()] for rank in (0, 1))
    monkeypatch.setattr(checkin.threading.Thread, "start", refuse)
    one.leave(7)
    assert other.departed() == {0: 7}
    assert checkin.wait_for_threads(0)
