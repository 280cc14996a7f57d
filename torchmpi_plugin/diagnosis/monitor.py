"""Answers about this process to other ranks that ask: so that an error can say more than "rank 2 is late".

A thread looks once a second whether somebody has asked, through torch's store, and answers on behalf of a
main thread that computes, sleeps or waits elsewhere. A rank that does not answer is stopped, dead or cut off.

For ``mpiplus status`` on another node one rank of each node asks the others there on their sockets. So a rank answers
that holds Python's lock too, as it does on the node of who asks.

A question has a number, a kind, and an answer for each rank. The counter of questions is what every rank looks at once
a second. torch's store lets everybody in who reaches its port. So questions and answers are signed with the world's
secret. Who can read the store can read the answers.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch.distributed import Store

from .. import _bridge
from ..engine import engine
from ..engine.work import in_words
from ..errors import attempt
from ..node import node as this_node
from ..status import asking
from ..status.files import RankSocket, all_sockets
from ..store.checkin import Report, start_thread
from . import flight_recorder, frames

#: How often a rank looks whether it was asked, and how long an answer is waited for. Seconds.
LOOK_EVERY, ANSWER_WITHIN = 1.0, 2.5
#: The same for a rank that asks those of its node first; less than the thread in C waits for this one.
SPOKEN_WITHIN = 4.5
#: What one rank of a node asks the others there, and for how long: faulthandler has the stacks at once, unless one is
#: stopped. All else takes each rank's Python anyway.
_OF_NODE = {"status": asking.MEMORY_SECONDS, "stacks": 2.5}


class Describes(Protocol):
    """The diagnosis of a group, which tells its last call."""

    def last_call(self) -> Report | None: ...


class World(Protocol):
    """The group that answers are given for."""

    @property
    def diagnosis(self) -> Describes: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...


#: Of the groups that are open and somebody holds, by their names.
diagnoses: weakref.WeakValueDictionary[str, Describes] = weakref.WeakValueDictionary()


def _place() -> str:
    """Return where the main thread is in the user's program."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frame = next(frames.of_user(innermost), None)
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def describe() -> str:
    """One clause about this process."""
    place = _place()
    at = f", at {place}" if place else ""
    waits = [f"waits for {work} since {work.elapsed():.1f} s" for work in list(engine.waiting.values())]
    if waits:
        return "; ".join(waits) + at
    call = _bridge.last_call()
    if call is None:
        return f"has called nothing yet{at}"
    where = f"(sequence number {call.sequence}, {call.subject.label})"
    return f"does not wait; its last call was {in_words(call)} {where}{at}"


def _answer() -> str:
    """The clause, and on a line of its own the last collective of each group."""
    held = ((it.key, it()) for it in diagnoses.valuerefs())  # another thread may make or drop one meanwhile
    last = {name: call for name, diagnosis in held if diagnosis is not None and (call := diagnosis.last_call())}
    return f"{describe()}\n{json.dumps(last)}"


def _written_trace() -> str:
    """Write the trace of this rank's flight recorder; say where, or why not."""
    try:
        return flight_recorder.current.write() if flight_recorder.current is not None else "no recorder"
    except Exception as error:
        return f"mpiplus: the trace cannot be written: {error}"


def _message(pid: int, text: str, problem: str = "") -> str:
    return json.dumps({"pid": pid, "text": text, "problem": problem})


def _neighbours(ranks: Sequence[int]) -> list[RankSocket]:
    """The sockets of this job's ranks on this node, this one's among them, of ``ranks``."""
    try:
        sockets = all_sockets()
    except PermissionError:
        return []
    jobs = {each.job for each in sockets if each.pid == os.getpid()}
    return [each for each in sockets if each.job in jobs and each.rank in ranks]


# ---- questions and answers in the store ----

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


class SignedStore:
    """A store in which what ranks of a world write, who alone know its secret, is signed, each text for its key.

    Attributes:
        plain: the store itself, for what is not signed.
    """

    def __init__(self, plain: Store, secret: str) -> None:
        self.plain, self._secret = plain, secret.encode()

    def put(self, key: str, text: str) -> None:
        self.plain.set(key, f"{self._signature(key, text)} {text}")

    def take(self, key: str) -> str | None:
        """The text, if it is there and one of the ranks has written it for this key."""
        # Not check() and get(), which waits for hours where who asked has taken the key back in between.
        signature, _, text = self.plain.compare_set(key, _NOTHING, _NOTHING).decode(errors="replace").partition(" ")
        return text if hmac.compare_digest(signature.encode(), self._signature(key, text).encode()) else None

    def _signature(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(errors="replace"), "sha256").hexdigest()


def ask(store: SignedStore, kind: str, ranks: Sequence[int], seconds: float) -> dict[int, str]:
    """Return what ``ranks`` answer. Those that do not in time are left out."""
    number = store.plain.add(_ASKED, 1)
    store.put(_key(number, "question"), f"{kind} {','.join(map(str, ranks))}")
    until = time.monotonic() + seconds
    answers: dict[int, str] = {}
    while len(answers) < len(ranks) and time.monotonic() < until:
        for rank in [rank for rank in ranks if rank not in answers]:
            answer = store.take(_key(number, rank))
            if answer is not None:
                answers[rank] = answer
        time.sleep(0.05)
    _forget(store.plain, [_key(number, each) for each in ("question", *answers)])
    return answers


def _forget(store: Store, keys: Sequence[str]) -> None:
    """Bound what is kept for one who watches a job, and asks every few seconds, for days."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot
        for key in keys:
            store.delete_key(key)


class Questions:
    """What this rank is asked, on a connection of its own."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._seen = 0

    def new(self) -> range:
        """The numbers of what was asked since the last time."""
        asked = int(self._store.plain.get(_ASKED)) if self._store.plain.check([_ASKED]) else 0
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
        while not self._store.plain.check([key]) and time.monotonic() < until:
            time.sleep(0.02)
        kind, _, text = (self._store.take(key) or "").partition(" ")
        if not text:
            return  # who asks has ended, or is no rank of this world
        for rank, answer in answers(kind, number, [int(word) for word in text.split(",")]).items():
            self._store.put(_key(number, rank), answer)


# ---- of a world ----

#: Set where an operation has timed out: those that are asked write their flight recorder's trace too.
_DUMP = "mpiplus/status/dump"


class Monitor:
    """One world's questions and answers.

    Args:
        connection: to the same store, which nobody else uses for long: a call waits for whatever else waits on it.
        elsewhere: the ranks on other nodes.
        secret: what only the ranks of this world know.
    """

    def __init__(
        self, store: Store, connection: Store, rank: int, size: int, node: int, elsewhere: list[int], secret: str
    ) -> None:
        self._store, self._connection = SignedStore(store, secret), SignedStore(connection, secret)
        self._elsewhere = elsewhere
        self._rank, self._size, self._node = rank, size, node
        self._stop = threading.Event()
        self._questions = Questions(self._connection)
        self._thread = start_thread(self._answer_forever, "mpiplus-status")

    def _answer_forever(self) -> None:
        """Whatever an answer raises: who asks next gets one."""
        has_store = True
        while not self._stop.wait(LOOK_EVERY):
            attempt("mpiplus status gets no answer", self._answer_locally, None)
            has_store = has_store and self._answer_others()

    def _answer_others(self) -> bool:
        """Return whether the store is still there: without it the world is at its end."""
        try:
            numbers = self._questions.new()
        except RuntimeError:
            return False
        if numbers:
            attempt("the flight recorder's trace is not written", self._write_trace_if_wanted, None)
            attempt("another rank gets no answer", lambda: self._questions.answer(numbers, self._answers), None)
        return True

    def _write_trace_if_wanted(self) -> None:
        if self._connection.plain.check([_DUMP]) and flight_recorder.current is not None:
            flight_recorder.current.write_after_failure()

    def _answers(self, kind: str, number: int, ranks: Sequence[int]) -> dict[int, str]:
        if kind in _OF_NODE:
            return self._of_node(kind, number, ranks)
        if self._rank not in ranks:
            return {}
        if kind == "describe":
            return {self._rank: _answer()}
        told = {"dump": _written_trace, "timeline": self._last_operations}[kind]()
        return {self._rank: _message(os.getpid(), told)}

    def _of_node(self, request: str, number: int, ranks: Sequence[int]) -> dict[int, str]:
        """By the first rank of a node that comes to it."""
        place = this_node.identity()
        if self._connection.plain.add(_key(number, "of", place), 1) > 1:
            return {}
        _forget(self._connection.plain, [_key(number - _REMEMBERED, "of", place)])
        sockets = _neighbours(ranks)
        answers = asking.ask(sockets, request, _OF_NODE[request])
        return {
            each.rank: _message(each.pid, answers[each.rank], asking.state_of(each.pid))
            if each.rank in answers
            else _message(each.pid, "", asking.why_silent(each))
            for each in sockets
        }

    def _last_operations(self) -> str:
        return flight_recorder.last_operations(self._rank, self._size, self._node)

    def _answer_locally(self) -> None:
        """Do for ``mpiplus status``, which has asked this process, what the thread in C cannot."""
        number, request = engine.status_request()
        if request == "dump":
            engine.give_status(number, _written_trace())
        elif request == "timeline":
            engine.give_status(number, self._last_operations())
        elif request:
            engine.give_status(number, json.dumps(self._ask_elsewhere(request)))

    def _ask_elsewhere(self, request: str) -> dict[int, str]:
        """Pass ``others KIND [RANK,...]`` on to ranks on other nodes."""
        _, kind, *numbers = [*request.split(), "", ""]
        wanted = {int(word) for word in numbers[0].split(",") if word.isdigit()} or set(self._elsewhere)
        ranks = [rank for rank in self._elsewhere if rank in wanted]
        return ask(self._connection, kind, ranks, SPOKEN_WITHIN) if ranks else {}

    def want_traces(self) -> None:
        """Let every rank that is asked from now on write the trace of its flight recorder first."""
        self._store.plain.set(_DUMP, "1")

    def ask(self, ranks: list[int]) -> dict[int, str]:
        """Ask ``ranks`` of the world: see :func:`_answer`. Those that do not answer in time are left out."""
        return ask(self._store, "describe", ranks, ANSWER_WITHIN)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_EVERY)


#: Of the current world, if that has several ranks; and that world's group.
monitor: Monitor | None = None
_world: World | None = None


def start(world: World, store: Store, connection: Store, node: int, elsewhere: list[int], secret: str) -> None:
    """Answer for this process, until ``world`` ends: see :class:`Monitor`."""
    global monitor, _world
    if _world is not None:
        stop(_world)
    made = Monitor(store, connection, world.rank(), world.size(), node, elsewhere, secret)
    monitor, _world = made, world


def answers_for(group: World) -> bool:
    """Return whether ``group`` is the world that :func:`start` was called with."""
    return _world is group


def stop(group: World) -> None:
    """``group`` has ended; nothing here may keep it, or the store it holds, alive. With the world, so do answers."""
    global monitor, _world  # noqa: PLW0603
    for name in [held.key for held in diagnoses.valuerefs() if held() is group.diagnosis]:
        diagnoses.pop(name, None)
    if monitor is not None and group is _world:
        monitor.stop()
        monitor = _world = None
