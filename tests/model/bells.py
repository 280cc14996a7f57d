"""Sleeping and waking on a node: c_src/shm/bells.c and engine/bell.c, sleeping.c once more, in all orders.

What moves is the protocol's three counters, without data. A rank does what it can, one store after another, and after
each looks whether somebody sleeps for that. With nothing to do it says what it sleeps for, looks once more, and
sleeps until it is rung for: here without the deadline that every sleep has in truth, so a lost ring is a dead end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

NOTHING = 1 << 30
NOTHING_AT_ALL = (NOTHING, NOTHING, NOTHING)
IN, REDUCED, OUT = range(3)

#: What could be done wrong, and is to be found.
MISTAKES = (
    "sleeps without a last look",
    "looks who sleeps before it publishes",
    "notes the rings after its last look",
    "rings only for all that is there at once",
    "sleeps for a whole ring",
)


class Rank(NamedTuple):
    """Where it stands: at `move` it does what it can, at `heard` it has moved `counter`, at `idle` there is nothing
    to do, at `armed` it has said that it sleeps, at `falls` it has looked for the last time, at `asleep` it sleeps."""

    counters: tuple[int, int, int] = (0, 0, 0)
    at: str = "move"
    counter: int = 0
    is_rung: bool = False  # since it has noted the rings
    is_asleep: bool = False
    awaited: tuple[int, int, int] = NOTHING_AT_ALL
    known: tuple[bool, ...] = ()


State = tuple[Rank, ...]


class Bells:
    """Ranks that take `chunks` chunks through rings of `ring` slots; `mistake`: one of MISTAKES, or none."""

    def __init__(self, ranks: int, chunks: int, ring: int, two_phase: bool, mistake: str = "") -> None:
        self.ranks, self.chunks, self.ring, self.two_phase, self.mistake = ranks, chunks, ring, two_phase, mistake

    def some_after(self, done: int) -> int:
        some = self.ring // 2 if self.ring > 3 else 1
        return min(done + (self.ring + 1 if self.mistake == "sleeps for a whole ring" else some), self.chunks)

    def least(self, state: State, counter: int) -> int:
        return min(rank.counters[counter] for rank in state)

    def next_store(self, state: State, me: int) -> int | None:
        """The counter that this rank can move on."""
        written, reduced, done = state[me].counters
        if written < self.chunks and self.least(state, OUT) > written - self.ring:
            return IN
        if self.two_phase and reduced < written and self.least(state, IN) > reduced:
            return REDUCED
        if done < written and self.least(state, REDUCED if self.two_phase else IN) > done:
            return OUT
        return None

    def targets(self, rank: Rank) -> tuple[int, int, int]:
        written, reduced, done = rank.counters
        out = self.some_after(written) - self.ring if written < self.chunks else NOTHING
        if not self.two_phase:
            return (self.some_after(done) if done < self.chunks else NOTHING, NOTHING, out)
        to_reduce = self.some_after(reduced) if reduced < self.chunks else NOTHING
        return (to_reduce, self.some_after(done) if done < self.chunks else NOTHING, out)

    def steps(self, state: State) -> Iterator[State]:
        for me, rank in enumerate(state):
            after = getattr(self, f"_{rank.at}")(state, me)
            if after is not None:
                yield after

    def _with(self, state: State, me: int, **changes: object) -> State:
        return (*state[:me], state[me]._replace(**changes), *state[me + 1 :])

    def _move(self, state: State, me: int) -> State | None:
        rank, counter = state[me], self.next_store(state, me)
        if counter is None:
            if rank.counters[OUT] == self.chunks:
                return None
            return self._with(state, me, at="idle")
        if self.mistake == "looks who sleeps before it publishes" and not rank.known:
            return self._with(state, me, known=tuple(other.is_asleep for other in state))
        moved = tuple(value + (i == counter) for i, value in enumerate(rank.counters))
        return self._with(state, me, at="heard", counter=counter, counters=moved)

    def _idle(self, state: State, me: int) -> State:
        """Has found nothing to do, and says so."""
        return self._with(state, me, at="armed", is_rung=False, is_asleep=True, awaited=self.targets(state[me]))

    def _heard(self, state: State, me: int) -> State:
        """Rings for those that sleep and have what they wait for."""
        counter, known = state[me].counter, state[me].known
        for other, rank in enumerate(state):
            hears = known[other] if known else rank.is_asleep
            value = self.least(state, counter)
            if self.mistake == "rings only for all that is there at once":
                value = min(self.least(state, c) for c in (IN, OUT))
            if other != me and hears and rank.is_asleep and value >= rank.awaited[counter]:
                at = "move" if rank.at == "asleep" else rank.at
                state = self._with(state, other, at=at, is_asleep=False, is_rung=at != "move", awaited=NOTHING_AT_ALL)
        return self._with(state, me, at="move", counter=0, known=())

    def _armed(self, state: State, me: int) -> State:
        """The last look."""
        if self.mistake != "sleeps without a last look" and self.next_store(state, me) is not None:
            return self._with(state, me, at="move", is_rung=False, is_asleep=False, awaited=NOTHING_AT_ALL)
        return self._with(state, me, at="falls")

    def _falls(self, state: State, me: int) -> State:
        """The kernel's look at the futex."""
        if state[me].is_rung and self.mistake != "notes the rings after its last look":
            return self._with(state, me, at="move", is_rung=False, is_asleep=False, awaited=NOTHING_AT_ALL)
        return self._with(state, me, at="asleep", is_rung=False)

    def _asleep(self, state: State, me: int) -> None:
        return None

    def dead_end(self) -> State | None:
        """A state in which somebody is not through, and nobody can go on."""
        first: State = (Rank(),) * self.ranks
        known, left = {first}, [first]
        while left:
            state = left.pop()
            followers = list(self.steps(state))
            if not followers and any(rank.counters[OUT] < self.chunks for rank in state):
                return state
            fresh = set(followers) - known
            known |= fresh
            left.extend(fresh)
        return None
