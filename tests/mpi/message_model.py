"""Programs of messages and collectives, and which of them must complete, whatever may happen: MPI's matching rules.

A program has a list of steps for each rank. A send may complete as soon as it is called or not before its message is
received, a collective when all ranks have called it. Messages from one rank with one tag do not overtake each other,
and each goes to the first receive in the order of their calls that could take it. Which sender's message a receive
from any rank takes is open, and so every choice is tried.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

ANY = -1
SEND, RECEIVE, COLLECTIVE, WAIT = "isend", "irecv", "collective", "wait"
COLLECTIVES = ("all_to_all_single", "scatter", "gather", "all_reduce", "all_gather", "barrier")
MOST_STATES = 3000


class Step(NamedTuple):
    """What a rank does.

    peer: of a message: the other rank, or ANY. tag: of a message. name: of a collective.
    at: of a wait, the place of the step that it waits for, in this rank's list.
    """

    kind: str
    peer: int = 0
    tag: int = 0
    name: str = ""
    at: int = -1


Program = tuple[tuple[Step, ...], ...]


# ---- which programs complete ----

Place = tuple[int, int]  # a rank, and a step of its list


@dataclass
class State:
    """How far a program has come.

    Attributes:
        next: each rank's next step.
        matched: sends whose message is received, and receives that have one.
        early: sends that are complete before their message is received.
    """

    program: Program
    next: list[int]
    matched: set[Place] = field(default_factory=set)
    early: set[Place] = field(default_factory=set)

    def copy(self) -> State:
        return replace(self, next=list(self.next), matched=set(self.matched), early=set(self.early))

    def key(self) -> tuple[tuple[int, ...], frozenset[Place], frozenset[Place]]:
        return tuple(self.next), frozenset(self.matched), frozenset(self.early)

    def called(self, kind: str, rank: int) -> list[int]:
        """Messages of a rank that are called, and not matched, in order."""
        steps = self.program[rank][: self.next[rank]]
        return [at for at, step in enumerate(steps) if step.kind == kind and (rank, at) not in self.matched]

    def blocked_by(self, rank: int) -> Place | None:
        """The step that a rank waits for."""
        if self.next[rank] == len(self.program[rank]):
            return None
        step = self.program[rank][self.next[rank]]
        if step.kind != WAIT:
            return None
        awaited = self.program[rank][step.at]
        if awaited.kind == COLLECTIVE:
            number = sum(each.kind == COLLECTIVE for each in self.program[rank][: step.at])
            return (
                None if all(self._collectives(other) > number for other in range(len(self.next))) else (rank, step.at)
            )
        return None if (rank, step.at) in self.matched | self.early else (rank, step.at)

    def _collectives(self, rank: int) -> int:
        return sum(step.kind == COLLECTIVE for step in self.program[rank][: self.next[rank]])

    def pairs(self, receiver: int) -> Iterator[tuple[Place, Place, bool]]:
        """A send and the receive that its message goes to, as far as that can be now; whether that is sure."""
        waiting = self.called(RECEIVE, receiver)
        for sender in range(len(self.next)):
            tags = set()
            for at in self.called(SEND, sender):
                step = self.program[sender][at]
                if step.peer != receiver or step.tag in tags:
                    continue
                tags.add(step.tag)  # those behind it must not overtake
                for place in waiting:
                    wanted = self.program[receiver][place]
                    if wanted.tag == step.tag and wanted.peer in (sender, ANY):
                        yield (sender, at), (receiver, place), wanted.peer != ANY
                        break

    def advance(self) -> None:
        """All that must happen and has no alternative. It takes no choice away from what comes later."""
        moved = True
        while moved:
            moved = False
            for rank, steps in enumerate(self.program):
                while self.next[rank] < len(steps) and self.blocked_by(rank) is None:
                    self.next[rank] += 1
                    moved = True
            for rank in range(len(self.next)):
                if sure := next(((one, two) for one, two, is_sure in self.pairs(rank) if is_sure), None):
                    self.matched |= set(sure)
                    moved = True

    def choices(self) -> list[tuple[Place, Place]]:
        return [(one, two) for rank in range(len(self.next)) for one, two, _ in self.pairs(rank)]


def completes(program: Program) -> bool:
    """Whether it does, whatever happens. False also where that is too much to try."""
    start = State(program, [0] * len(program))
    todo, seen = [start], set()
    while todo:
        state = todo.pop()
        state.advance()
        if state.key() in seen:
            continue
        seen.add(state.key())
        if len(seen) > MOST_STATES:
            return False
        choices = state.choices()
        finished = all(at == len(steps) for at, steps in zip(state.next, program, strict=True))
        left_over = any(state.called(kind, rank) for kind in (SEND, RECEIVE) for rank in range(len(program)))
        if not choices and (not finished or left_over):
            return False
        for sender, receiver in choices:
            after = state.copy()
            after.matched |= {sender, receiver}
            todo.append(after)
        for rank in range(len(program)):
            blocked = state.blocked_by(rank)
            if blocked and program[rank][blocked[1]].kind == SEND:  # it need not wait for its receiver
                after = state.copy()
                after.early.add(blocked)
                todo.append(after)
    return True


# ---- programs ----


class _Rank:
    """A list of steps under construction: steps have numbers, and waits those of what they wait for."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.items: list[tuple[int, Step]] = []
        self.last_collective = -1
        self.count = 0

    def add(self, step: Step, earliest: int | None = None) -> None:
        """At the end, or anywhere from a place on; perhaps waited for at the end, which is where time is."""
        self.count += 1
        place = len(self.items) if earliest is None else self.dice.choice((earliest, len(self.items)))
        self.items.insert(place, (self.count, step))
        if place <= self.last_collective:
            self.last_collective += 1
        if step.kind == COLLECTIVE:
            self.last_collective = place
        if self.dice.random() < 0.7:
            self.items.append((0, Step(WAIT, at=self.count)))

    def steps(self) -> tuple[Step, ...]:
        """With waits at the end for what has none."""
        waited = {step.at for _, step in self.items if step.kind == WAIT}
        rest = [number for number, step in self.items if step.kind != WAIT and number not in waited]
        self.dice.shuffle(rest)
        self.items += [(0, Step(WAIT, at=number)) for number in rest]
        place_of = {number: place for place, (number, _) in enumerate(self.items)}
        return tuple(step._replace(at=place_of[step.at] if step.kind == WAIT else -1) for _, step in self.items)


def draw(dice: random.Random, size: int) -> Program:
    """One that may or may not complete; each message is called for before the next one is sent, or long before."""
    ranks = [_Rank(dice) for _ in range(size)]
    favourite, sender = dice.randrange(size), dice.randrange(size)
    for _ in range(dice.randint(2, 7)):
        if dice.random() < 0.3:
            name = dice.choices(COLLECTIVES, weights=(3, 3, 3, 1, 1, 1))[0]
            for rank in ranks:
                rank.add(Step(COLLECTIVE, name=name), rank.last_collective + 1)
            continue
        if dice.random() < 0.3:
            sender = dice.randrange(size)
        receiver = dice.choice([rank for rank in range(size) if rank != sender])
        if dice.random() < 0.3 and sender != favourite:
            receiver = favourite  # receives have to do with each other where they are one rank's
        tag = dice.choice((0, 0, 0, 0, 1))
        ranks[sender].add(Step(SEND, receiver, tag))
        ranks[receiver].add(Step(RECEIVE, ANY if dice.random() < 0.4 else sender, tag), 0)
        sender = receiver  # which thereby has waited for this message, perhaps
    return tuple(rank.steps() for rank in ranks)


def draw_complete(dice: random.Random, size: int) -> Program:
    """One that must complete."""
    while True:
        program = draw(dice, size)
        if completes(program):
            return program
