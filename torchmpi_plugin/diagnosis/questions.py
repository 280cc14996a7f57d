"""Questions that ranks of a world put to each other through torch's store, on whatever node they are.

A question has a kind, a number among those of its kind, and an answer for each rank. A counter of all questions is
what every rank looks at once a second; who sees it move looks at the kinds. The kind's own counter goes up first, so
that nobody who has seen the one misses the other.

torch's store lets everybody in who reaches its port. So questions and answers carry a proof that who wrote them knows
the world's secret. Who can read the store can read the answers.
"""

from __future__ import annotations

import contextlib
import hmac
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import Store

_ASKED = "mpiplus/status/asked"
#: No value that a key has, so that it is read only.
_NOTHING = "-"
#: How long who asks may be between the number of its question and the question. Seconds.
_UNASKED_SECONDS = 1.0
#: How many questions later nobody of a node can still be about to answer one.
_REMEMBERED = 100

#: From a question's number and the ranks that are asked to answers by rank.
Answers = Callable[[int, Sequence[int]], Mapping[int, str]]


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
    number = store.add(_key(kind, "asked"), 1)
    seal.put(store, _key(kind, number, "ranks"), ",".join(map(str, ranks)))
    store.add(_ASKED, 1)
    until = time.monotonic() + seconds
    answers: dict[int, str] = {}
    while len(answers) < len(ranks) and time.monotonic() < until:
        for rank in [rank for rank in ranks if rank not in answers]:
            answer = seal.take(store, _key(kind, number, rank))
            if answer is not None:
                answers[rank] = answer
        time.sleep(0.05)
    _forget(store, [_key(kind, number, each) for each in ("ranks", *answers)])
    return answers


def _forget(store: Store, keys: Sequence[str]) -> None:
    """Bound what is kept for one who watches a job, and asks every few seconds, for days."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot
        for key in keys:
            store.delete_key(key)


def is_first(store: Store, kind: str, number: int, place: str) -> bool:
    """Return whether nobody in this place has said so of this question before: one rank of a node speaks for all."""
    if store.add(_key(kind, number, "of", place), 1) > 1:
        return False
    _forget(store, [_key(kind, number - _REMEMBERED, "of", place)])
    return True


class Inbox:
    """Answers what this rank is asked, on a connection of its own."""

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store, self._seal = store, seal
        self._seen = 0
        self._answered: defaultdict[str, int] = defaultdict(int)

    def has_mail(self) -> bool:
        """Return whether something was asked since the last time."""
        asked = int(self._store.get(_ASKED)) if self._store.check([_ASKED]) else 0
        has_more, self._seen = asked > self._seen, asked
        return has_more

    def answer(self, kinds: Mapping[str, Answers]) -> None:
        """Answer everything that was asked, each kind of question by what ``kinds`` has for it."""
        until = time.monotonic() + _UNASKED_SECONDS
        for kind, answers in kinds.items():
            counter = _key(kind, "asked")
            asked = int(self._store.get(counter)) if self._store.check([counter]) else 0
            for number in range(self._answered[kind] + 1, asked + 1):
                self._answered[kind] = number  # whatever becomes of it: the next one is to be answered
                ranks = self._question(_key(kind, number, "ranks"), until)
                for rank, answer in answers(number, ranks).items() if ranks else ():
                    self._seal.put(self._store, _key(kind, number, rank), answer)

    def _question(self, key: str, until: float) -> list[int]:
        """Return which ranks are asked; none: who asks has ended, or is no rank of this world.

        ``until`` is that of all questions: of those asked while this rank was stopped, most are over.
        """
        while not self._store.check([key]) and time.monotonic() < until:
            time.sleep(0.02)
        text = self._seal.take(self._store, key)
        return [int(word) for word in text.split(",")] if text else []
