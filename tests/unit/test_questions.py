"""Ranks answer each other through a store that lets everybody in: who does not know the secret is not answered."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch.distributed import HashStore

from torchmpi_plugin.diagnosis.monitor import Answers, Inbox, Seal, ask


def answering(asked: list[Sequence[int]]) -> Answers:
    def answer(kind: str, _: int, ranks: Sequence[int]) -> dict[int, str]:
        assert kind == "status"
        asked.append(ranks)
        return {1: "fine"} if 1 in ranks else {}

    return answer


def asked_with(secret: str, forged: bool = False) -> tuple[dict[int, str], list[Sequence[int]], HashStore]:
    """What a rank is told that asks rank 1, what rank 1 was asked, and what is left in the store."""
    store, told, heard = HashStore(), {}, []
    thread = threading.Thread(target=lambda: told.update(ask(store, Seal(secret), "status", [1], 2.0)))
    thread.start()
    inbox = Inbox(store, Seal("secret"))
    while not (numbers := inbox.mail()):
        pass
    if forged:
        store.set("mpiplus/status/1/1", "0 wrong")
    else:
        inbox.answer(numbers, answering(heard))
    thread.join()
    assert not inbox.mail()
    return told, heard, store


def test_an_answer() -> None:
    """It is not left in the store: who watches a job asks for days."""
    told, heard, store = asked_with("secret")
    assert (told, heard) == ({1: "fine"}, [[1]])
    assert not store.check(["mpiplus/status/1/1"])


def test_who_does_not_know_the_secret() -> None:
    assert asked_with("another")[:2] == ({}, [])
    assert asked_with("secret", forged=True)[0] == {}


def test_who_has_ended_before_the_question() -> None:
    """The next one is answered."""
    store, heard = HashStore(), []
    store.add("mpiplus/status/asked", 1)
    inbox = Inbox(store, Seal("secret"))
    inbox.answer(inbox.mail(), answering(heard))
    assert heard == []
    thread = threading.Thread(target=ask, args=(store, Seal("secret"), "status", [1], 2.0))
    thread.start()
    while not (numbers := inbox.mail()):
        pass
    inbox.answer(numbers, answering(heard))
    thread.join()
    assert (list(numbers), heard) == ([2], [[1]])
