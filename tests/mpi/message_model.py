"""Programs of messages and collectives that must complete, whatever may happen: MPI's matching rules.

A program has a list of steps for each rank. A send may complete as soon as it is called or not before its message is
received, a collective when all ranks have called it. Messages from one rank with one tag do not overtake each other,
and each goes to the first receive in the order of their calls that could take it. Whose message a receive from any rank
takes is open. So steps are drawn in one order of all ranks, and in it a wait comes behind all that it needs, whichever
that is: the first wait in this order that has not ended ends.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

ANY = -1
SEND, RECEIVE, COLLECTIVE, WAIT = "isend", "irecv", "collective", "wait"
COLLECTIVES = ("all_to_all_single", "scatter", "gather", "all_reduce", "all_gather", "barrier")


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


class _Drawn:
    """A program under construction.

    Attributes:
        sends, named: messages from a rank to another with a tag that are sent, and received from that rank by name.
        anyones: receives of a rank with a tag that take anyone's message. Those by name come before all of them.
        waited: for which step of a rank nobody has waited, and its number among those of its kind.
    """

    def __init__(self, dice: random.Random, size: int) -> None:
        self.dice, self.size = dice, size
        self.lists: list[list[Step]] = [[] for _ in range(size)]
        self.sends, self.named = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
        self.anyones, self.collectives = Counter[tuple[int, int]](), Counter[int]()
        self.waited: dict[tuple[int, int], int] = {}

    def call(self, rank: int, step: Step) -> None:
        if step.kind == SEND:
            counts: Counter = self.sends
            key: object = (rank, step.peer, step.tag)
        elif step.kind == COLLECTIVE:
            counts, key = self.collectives, rank
        elif self.anyones[rank, step.tag] or self.dice.random() < 0.4:
            step, counts, key = step._replace(peer=ANY), self.anyones, (rank, step.tag)
        else:
            counts, key = self.named, (step.peer, rank, step.tag)
        self.waited[rank, len(self.lists[rank])] = counts[key]
        counts[key] += 1
        self.lists[rank].append(step)

    def has_all(self, rank: int, at: int) -> bool:
        """Whether all is called that a step needs to complete."""
        step, number = self.lists[rank][at], self.waited[rank, at]
        if step.kind == COLLECTIVE:
            return all(self.collectives[other] > number for other in range(self.size))
        if step.kind == SEND:  # a later message may be taken in its place by a receive from anyone
            return self.named[rank, step.peer, step.tag] > number
        if step.peer != ANY:
            return self.sends[step.peer, rank, step.tag] > number
        keys = [(other, rank, step.tag) for other in range(self.size)]
        return sum(max(0, self.sends[key] - self.named[key]) for key in keys) > number

    def wait(self, everything: bool = False) -> None:
        """For some of what can be waited for; at the end for all, in any order."""
        steps = list(self.waited)
        self.dice.shuffle(steps)
        for rank, at in steps:
            if everything or (self.dice.random() < 0.3 and self.has_all(rank, at)):
                self.lists[rank].append(Step(WAIT, at=at))
                del self.waited[rank, at]


def draw_complete(dice: random.Random, size: int) -> Program:
    """One that must complete; each message is called for before it is sent, or long after, and the other way round."""
    drawn = _Drawn(dice, size)
    later: list[list[Step]] = [[] for _ in range(size)]
    for _ in range(dice.randint(2, 7)):
        if dice.random() < 0.3:
            name = dice.choices(COLLECTIVES, weights=(3, 3, 3, 1, 1, 1))[0]
            for steps in later:
                steps.append(Step(COLLECTIVE, name=name))
        else:
            sender, receiver = dice.sample(range(size), 2)
            tag = dice.choice((0, 0, 0, 0, 1))
            later[sender].append(Step(SEND, receiver, tag))
            later[receiver].append(Step(RECEIVE, sender, tag))
        for rank in dice.sample(range(size), size):
            while later[rank] and dice.random() < 0.6:
                step = dice.choice(later[rank])  # of equal ones the first: collectives keep their order
                step = next(each for each in later[rank] if each is step or {each.kind, step.kind} == {COLLECTIVE})
                later[rank].remove(step)
                drawn.call(rank, step)
            drawn.wait()
    for rank, steps in enumerate(later):
        for step in steps:
            drawn.call(rank, step)
        drawn.wait()
    drawn.wait(everything=True)
    return tuple(tuple(steps) for steps in drawn.lists)
