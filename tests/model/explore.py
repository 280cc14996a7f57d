"""Runs ranks of protocol.py in every order there is, and looks for what must not be.

A state is what is shared (counters, signatures, slots) and where each rank is: its own variables when it last began
`progress_all`, and the answers it has got since. From there the rank is run again up to its next access, which is
remembered, so each rank's code runs once for each of its own states, however many states all ranks together have.

A load that finds the counter far enough finds it so whenever it is made, as counters only grow. Such a load is made
at once and its alternatives are not tried; of all orders only those are left out that end in the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple


class ProtocolError(AssertionError):
    """Something that must not be; with the accesses that lead there."""


class Shared(NamedTuple):
    """What all ranks see, an entry for each rank, of slots and signatures one for each place in the ring."""

    counters: tuple[tuple[int, int, int], ...]
    signatures: tuple[tuple[Any, ...], ...]
    #: (what was written: (call, chunk); whether this rank's part is reduced); the last one is its tensor
    slots: tuple[tuple[Any, ...], ...]


COUNTERS = {"in": 0, "reduced": 1, "out": 2}


def changed(rows: tuple, rank: int, place: int, value: Any) -> tuple:
    row = rows[rank]
    return (*rows[:rank], (*row[:place], value, *row[place + 1 :]), *rows[rank + 1 :])


def store(shared: Shared, rank: int, counter: str, value: int) -> Shared:
    if value < shared.counters[rank][COUNTERS[counter]]:
        raise ProtocolError(f"rank {rank} stores {value} in `{counter}`, which is less than before")
    return shared._replace(counters=changed(shared.counters, rank, COUNTERS[counter], value))


def sign(shared: Shared, rank: int, slot: int, signature: tuple) -> Shared:
    return shared._replace(signatures=changed(shared.signatures, rank, slot, signature))


def write(shared: Shared, rank: int, slot: int, tag: tuple) -> Shared:
    return shared._replace(slots=changed(shared.slots, rank, slot, (tag, False)))


def reduce_in_place(shared: Shared, rank: int, slot: int) -> Shared:
    return shared._replace(slots=changed(shared.slots, rank, slot, (shared.slots[rank][slot][0], True)))


def signature(shared: Shared, rank: int, of: int, slot: int, position: int) -> Any:
    found = shared.signatures[of][slot]
    if found is None or found[0] != position:
        raise ProtocolError(f"rank {rank} compares its call {position} with rank {of}'s {found}")
    return found[1]


def read(shared: Shared, rank: int, of: int, slot: int, tag: tuple, reduced: bool) -> None:
    found = shared.slots[of][slot]
    if found is None or found[0] != tag or (reduced and not found[1]):
        raise ProtocolError(f"rank {rank} reads {found} in rank {of}'s slot {slot}, and takes it for {tag}, {reduced}")


WRITES = {"store": store, "sign": sign, "write": write, "reduced in place": reduce_in_place}
READS = {"signature": signature, "read": read}


@dataclass
class Explorer:
    """All runs of `programs`, one list of calls for each rank.

    Args:
        protocol: protocol.py, or a copy of it with a bug.
        programs: each of the same number of calls.
        ring: slots per rank.
        ahead: how many calls a rank may have begun that are not complete; 1: every call is synchronous.
        aborts: the rank whose group is aborted at some time, if any.
        limit: the most states.
    """

    protocol: ModuleType
    programs: Sequence[Sequence[Any]]
    ring: int = 2
    ahead: int = 1
    aborts: int | None = None
    limit: int = 2_000_000

    def __post_init__(self) -> None:
        size = len(self.programs)
        self.channels: list[dict[tuple, Any]] = [{} for _ in range(size)]
        self.accesses: list[dict[tuple, Any]] = [{} for _ in range(size)]
        nothing = ((None,) * (self.ring + 1),) * size
        self.begin = Shared(((0, 0, 0),) * size, nothing, nothing)

    # ---- one rank ----

    def place(self, rank: int, channel: Any) -> tuple:
        """Where a rank is that is about to begin `progress_all`."""
        key = self.protocol.frozen(channel)
        self.channels[rank].setdefault(key, channel)
        return key, ()

    def access(self, rank: int, place: tuple) -> tuple | None:
        """The next access from `place`; None if the rank has nothing to do. As a second value, where it is then if
        there is none: at the end of `progress_all`."""
        known = self.accesses[rank].get(place)
        if known is None:
            known = self.accesses[rank][place] = self.run(rank, *place)
        return known

    def run(self, rank: int, key: tuple, answers: tuple) -> tuple:
        channel = self.protocol.copy(self.channels[rank][key])
        code = self.protocol.progress_all(channel)
        try:
            access = next(code)
            for answer in answers:
                access = code.send(answer)
        except StopIteration:
            return None, self.place(rank, channel)
        return access, None

    def answered(self, rank: int, place: tuple, answer: Any) -> tuple:
        """Where a rank is once its access has got this answer."""
        place = place[0], (*place[1], answer)
        access, end = self.access(rank, place)
        return place if access else end

    # ---- all ranks ----

    def perform(self, shared: Shared, rank: int, access: tuple) -> tuple[Shared, Any, bool]:
        """What is shared after an access, its answer, and whether it would be the same at any later time."""
        what, *about = access
        if what == "load":
            of, counter, target = about
            value = shared.counters[of][COUNTERS[counter]]
            return shared, value, value >= target
        if what == "own":
            return shared, shared.counters[rank][COUNTERS[about[0]]], True
        if what in READS:
            return shared, READS[what](shared, rank, *about), False
        return WRITES[what](shared, rank, *about), None, False

    def others(self, rank: int, place: tuple) -> list[tuple]:
        """What a rank can do instead of going on: begin its next call, be aborted."""
        key, answers = place
        if answers:
            return []
        channel, found = self.channels[rank][key], []
        program = self.programs[rank]
        if channel.called < len(program) and channel.called - len(channel.outcomes) < self.ahead:
            after = self.protocol.copy(channel)
            self.protocol.start(after, program[channel.called])
            found.append(("calls", self.place(rank, after)))
        if self.aborts == rank and not channel.aborted:
            after = self.protocol.copy(channel)
            after.aborted = True
            found.append(("is aborted", self.place(rank, after)))
        return found

    def successors(self, shared: Shared, places: tuple) -> list[tuple]:
        """(what happens, what is shared then, where the ranks are then)."""
        found = []
        for rank, place in enumerate(places):
            access, end = self.access(rank, place)
            if access:
                after, answer, stable = self.perform(shared, rank, access)
                there = self.answered(rank, place, answer)
                step = ((rank, *access), after, (*places[:rank], there, *places[rank + 1 :]))
                if stable:
                    return [step]
                found.append(step)
            elif end != place:  # something was done that nobody else sees
                return [((rank, "goes on"), shared, (*places[:rank], end, *places[rank + 1 :]))]
        for rank, place in enumerate(places):
            for what, there in self.others(rank, place):
                found.append(((rank, what), shared, (*places[:rank], there, *places[rank + 1 :])))
        return found

    def run_all(self) -> int:
        """Try everything. The number of states.

        Raises:
            ProtocolError: with the accesses that lead to what must not be.
        """
        size = len(self.programs)
        first = tuple(self.place(r, self.protocol.Channel(r, size, self.ring)) for r in range(size))
        start = (self.begin, first)
        came: dict[tuple, tuple | None] = {start: None}
        open_states = [start]
        while open_states:
            state = open_states.pop()
            try:
                following = self.successors(*state)
                if not any(answers for _, answers in state[1]):
                    self.check_end(*state)
            except ProtocolError as violation:
                raise ProtocolError(f"{violation}\n{self.path(came, state)}") from None
            for what, after, there in following:
                new = after, there
                if new not in came:
                    came[new] = state, what
                    open_states.append(new)
            if len(came) > self.limit:
                raise RuntimeError(f"more than {self.limit} states")
        return len(came)

    def path(self, came: dict, state: tuple) -> str:
        steps = []
        while came[state]:
            state, what = came[state]
            steps.append(f"  rank {' '.join(map(str, what))}")
        return "\n".join(reversed(steps))

    # ---- the end of a run ----

    def is_stuck(self, shared: Shared, rank: int, place: tuple) -> bool:
        """Whether a rank, at the beginning of `progress_all`, changes nothing as long as the others do nothing."""
        if self.others(rank, place):
            return False
        at = place
        while True:
            access, end = self.access(rank, at)
            if not access:
                return end == place
            after, answer, _ = self.perform(shared, rank, access)
            if after != shared:
                return False
            at = self.answered(rank, at, answer)
            if not at[1]:
                return at == place

    def check_end(self, shared: Shared, places: tuple) -> None:
        """If no rank can go on: that all are at the end, and agree."""
        if not all(self.is_stuck(shared, rank, place) for rank, place in enumerate(places)):
            return
        channels = [self.channels[rank][key] for rank, (key, _) in enumerate(places)]
        if any(channel.aborted for channel in channels):
            return  # the others wait for that rank, to their deadlines
        for rank, (channel, program) in enumerate(zip(channels, self.programs, strict=True)):
            if len(channel.outcomes) < len(program):
                raise ProtocolError(f"deadlock: rank {rank} is in its call {len(channel.outcomes)} for ever")
        ends = {(entered, left) for entered, _, left in shared.counters} | {(c.next, c.next) for c in channels}
        if len(ends) > 1:
            raise ProtocolError(f"at the end the ranks are at different chunks: {shared.counters}")
        for position, calls in enumerate(zip(*self.programs, strict=True)):
            agree = {call.signature for call in calls} == {calls[0].signature} != {self.protocol.OOM_PLACEHOLDER}
            for channel, call in zip(channels, calls, strict=True):
                wanted = self.protocol.DONE if agree else self.protocol.FAILED
                wanted = self.protocol.MEMORY if call.oom else wanted
                if channel.outcomes[position] != wanted:
                    raise ProtocolError(f"rank {channel.rank}: call {position} is {channel.outcomes[position]}")
