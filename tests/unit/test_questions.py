"""Ranks answer through a store that lets everybody in, but only who knows the secret; which frames are the user's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import HashStore

import torchmpi_plugin
from torchmpi_plugin.diagnosis import frames
from torchmpi_plugin.diagnosis.monitor import Answers, Questions, SignedStore, ask


def answering(asked: list[Sequence[int]]) -> Answers:
    def answer(kind: str, _: int, ranks: Sequence[int]) -> dict[int, str]:
        assert kind == "status"
        asked.append(ranks)
        return {1: "fine"} if 1 in ranks else {}

    return answer


def asked_with(secret: str, forged: bool = False) -> tuple[dict[int, str], list[Sequence[int]], HashStore]:
    """What a rank is told that asks rank 1, what rank 1 was asked, and what is left in the store."""
    store, told, heard = HashStore(), {}, []
    thread = threading.Thread(target=lambda: told.update(ask(SignedStore(store, secret), "status", [1], 2.0)))
    thread.start()
    questions = Questions(SignedStore(store, "secret"))
    while not (numbers := questions.new()):
        pass
    if forged:
        store.set("mpiplus/status/1/1", "0 wrong")
    else:
        questions.answer(numbers, answering(heard))
    thread.join()
    assert not questions.new()
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
    questions = Questions(SignedStore(store, "secret"))
    questions.answer(questions.new(), answering(heard))
    assert heard == []
    thread = threading.Thread(target=ask, args=(SignedStore(store, "secret"), "status", [1], 2.0))
    thread.start()
    while not (numbers := questions.new()):
        pass
    questions.answer(numbers, answering(heard))
    thread.join()
    assert (list(numbers), heard) == ([2], [[1]])


def called_from(file: str, call: str = "look()", **names: object) -> list[str]:
    """The names of the user's functions, as seen from a function in ``file``."""
    found: list[FrameType] = []
    space = {"look": lambda: found.append(sys._getframe(1)), **names}
    exec(compile(f"def there():\n    {call}\n", file, "exec"), space)
    space["there"]()  # type: ignore[operator]
    return [frame.f_code.co_name for frame in frames.of_user(found[0])]


def test_ours_and_torchs_frames_are_left_out() -> None:
    for module in (torch, torchmpi_plugin):
        directory = Path(module.__file__).parent
        for file in (directory / "here.py", directory / "distributed" / "below" / "here.py", threading.__file__):
            assert called_from(str(file))[0] == "called_from"

    # the user's own directory called torch
    assert called_from("/home/someone/torch/train.py")[:2] == ["there", "called_from"]
    assert called_from("/home/someone/torch/distributed/train.py")[0] == "there"
