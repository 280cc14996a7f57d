"""Questions that ranks of a world put to each other through torch's store, on whatever node they are.

A question has a number, a kind, and an answer for each rank. The counter of questions is what every rank looks at once
a second.

torch's store lets everybody in who reaches its port. So questions and answers carry a proof that who wrote them knows
the world's secret. Who can read the store can read the answers.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import time
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import Store

from ..errors import attempt

_ASKED = "mpiplus/status/asked"
#: No value that a key has, so that it is read only.
_NOTHING = "-"
#: How long who asks may be between the number of its question and the question. Seconds.
_UNASKED_SECONDS = 1.0
#: How many questions later nobody of a node can still be about to answer one.
_REMEMBERED = 100

#: From a question's kind, its number, and the ranks that are asked to answers by rank.
Answers = Callable[[str, int, Sequence[int]], Mapping[int, str]]


def _key(*parts: object) -> str:
    return "/".join(["mpiplus/status", *map(str, parts)])


class Seal:
    """Puts a proof on what ranks of a world tell each other, who alone know its secret, under a key of the store."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def put(self, store: Store, key: str, text: str) -> None:
        store.set(key, f"{self._proof(key, text)} {text}")

    def take(self, store: Store, key: str) -> str | None:
        """The text, if it is there and one of the ranks has written it for this key."""
        # Not check() and get(), which waits for hours where who asked has taken the key back in between.
        proof, _, text = store.compare_set(key, _NOTHING, _NOTHING).decode(errors="replace").partition(" ")
        return text if hmac.compare_digest(proof.encode(), self._proof(key, text).encode()) else None

    def _proof(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(errors="replace"), "sha256").hexdigest()


def ask(store: Store, seal: Seal, kind: str, ranks: Sequence[int], seconds: float) -> dict[int, str]:
    """Return what ``ranks`` answer. Those that do not in time are left out."""
    number = store.add(_ASKED, 1)
    seal.put(store, _key(number, "question"), f"{kind} {','.join(map(str, ranks))}")
    until = time.monotonic() + seconds
    answers: dict[int, str] = {}
    while len(answers) < len(ranks) and time.monotonic() < until:
        for rank in [rank for rank in ranks if rank not in answers]:
            answer = seal.take(store, _key(number, rank))
            if answer is not None:
                answers[rank] = answer
        time.sleep(0.05)
    _forget(store, [_key(number, each) for each in ("question", *answers)])
    return answers


def _forget(store: Store, keys: Sequence[str]) -> None:
    """Bound what is kept for one who watches a job, and asks every few seconds, for days."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot
        for key in keys:
            store.delete_key(key)


def is_first(store: Store, number: int, place: str) -> bool:
    """Return whether nobody in this place has said so of this question before: one rank of a node speaks for all."""
    if store.add(_key(number, "of", place), 1) > 1:
        return False
    _forget(store, [_key(number - _REMEMBERED, "of", place)])
    return True


class Inbox:
    """Answers what this rank is asked, on a connection of its own."""

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store, self._seal = store, seal
        self._seen = 0

    def mail(self) -> range:
        """The numbers of what was asked since the last time."""
        asked = int(self._store.get(_ASKED)) if self._store.check([_ASKED]) else 0
        new, self._seen = range(self._seen + 1, asked + 1), asked
        return new

    def answer(self, numbers: Sequence[int], answers: Answers) -> None:
        """Answer these questions. Whatever becomes of one, the next is answered."""
        # Of all of them: of those asked while this rank was stopped, most are over.
        until = time.monotonic() + _UNASKED_SECONDS
        for number in numbers:
            attempt("another rank gets no answer", functools.partial(self._answer, number, answers, until), None)

    def _answer(self, number: int, answers: Answers, until: float) -> None:
        key = _key(number, "question")
        while not self._store.check([key]) and time.monotonic() < until:
            time.sleep(0.02)
        kind, _, text = (self._seal.take(self._store, key) or "").partition(" ")
        if not text:
            return  # who asks has ended, or is no rank of this world
        for rank, answer in answers(kind, number, [int(word) for word in text.split(",")]).items():
            self._seal.put(self._store, _key(number, rank), answer)
