"""The protocol of shared memory: c_src/shm/protocol.c and signatures.c once more, function by function.

explore.py runs it in all orders.

Each `yield` is one access to what other ranks can see: an atomic load or store of a counter, a signature, a slot's
data. Between two of them a rank is alone. What is left out: the data itself (a slot holds a tag that says what was
written there), staging, and the bound on rounds in `move`, as one round at a time is the same, taken up more often.

test_model.py notices when a function of them changes and this file was not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

NO_MEMORY = "no memory"
PENDING, DONE, FAILED = "pending", "done", "failed"
CANCELLED, MEMORY = "cancelled", "memory"


class Call(NamedTuple):
    """What a rank calls; equal on ranks that agree (`oom` apart).

    Attributes:
        kind: "all_reduce" (everybody reads everybody), "broadcast" (everybody reads rank 0), "reduce" (rank 0 reads),
            "barrier" (nobody reads), "exchange" (everybody reads everybody; of as many chunks as the longest has).
        chunks: how many chunk numbers it takes.
        two_phase: reduced part by part, in place, between writing and reading.
        oom: there is no memory for it.
        bus: this rank's device copies to the slots: chunks are longer from the second one on, here of two.
        at_once: the root of a broadcast on the bus has copied all to its first slot, for which the others have several.
        peers: besides it can read the tensors of the others where they are, and they its.
        halves: if all can, each reduces what it reads, and what comes of it is read by the others in a second half; if
            all are peers there, else in the slots.
        withdrawn: its first chunk cannot come from the device, and this rank says that it makes no call.
    """

    kind: str
    chunks: int = 1
    two_phase: bool = False
    oom: bool = False
    bus: bool = False
    at_once: bool = False
    peers: bool = False
    halves: bool = False
    withdrawn: bool = False

    @property
    def signature(self) -> Call:
        if self.withdrawn or self.oom:
            return OOM_PLACEHOLDER
        compared = self._replace(bus=False, at_once=False, peers=False, halves=False)
        return compared._replace(chunks=0) if self.kind == "exchange" else compared


OOM_PLACEHOLDER = Call(NO_MEMORY)


@dataclass
class Op:
    """struct shm_op. `position`: the number of the call in the program, for the checks."""

    position: int
    call: Call
    first: int = 0
    written: int = 0
    reduced: int = 0
    done: int = 0
    checked: bool = False
    oom_after: int = 0
    planned: int = 0
    in_parts: bool = False
    between_devices: bool = False
    is_half: bool = False  # of a call that is made in two
    is_second: bool = False  # stands behind its first half, which has no chunks for it before all have called the same

    @property
    def chunks(self) -> int:
        is_one = self.call.kind == "exchange" or self.call.at_once
        return self.planned or (0 if self.is_second else 1 if is_one else self.call.chunks)

    @property
    def two_phase(self) -> bool:
        return (self.call.two_phase or self.in_parts) and not self.between_devices and not self.is_half

    def writes(self, rank: int) -> bool:
        return self.call.kind in ("all_reduce", "reduce", "exchange") or (self.call.kind == "broadcast" and rank == 0)

    def reads(self, rank: int) -> bool:
        if self.is_half and not self.is_second:
            return True
        reading = {"all_reduce": True, "exchange": True, "broadcast": rank != 0, "reduce": rank == 0}
        return reading.get(self.call.kind, False)

    def wait_for(self, rank: int) -> int:
        if self.between_devices or (self.is_half and not self.is_second):
            return -1
        if self.call.kind == "broadcast":
            return 0
        return rank if self.call.kind == "reduce" and rank != 0 and not self.two_phase else -1


@dataclass
class Channel:
    """struct mpp_channel, and this rank's place in its program."""

    rank: int
    size: int
    ring: int
    next: int = 0
    known: dict[str, int] = field(default_factory=lambda: {"in": 0, "reduced": 0, "out": 0})  # all_in and so on
    queue: list[Op] = field(default_factory=list)  # from head to tail
    oom_first: int = 0
    oom_total: int = 0
    oom_placeholder: Op = field(default_factory=lambda: Op(-1, OOM_PLACEHOLDER))
    aborted: bool = False
    called: int = 0
    outcomes: list[str] = field(default_factory=list)

    def slot(self, number: int) -> int:
        return number % self.ring

    @property
    def tensor(self) -> int:
        """The place of this rank's own tensor, behind the slots."""
        return self.ring


Access = Any  # generators of accesses; typing them says nothing here


def reached(c: Channel, counter: str, target: int) -> Access:
    if c.known[counter] >= target:
        return True
    least = None
    for r in range(c.size):
        value = yield "load", r, counter, target
        if value < target:
            return False
        least = value if least is None else min(least, value)
    c.known[counter] = least
    return True


def may_write(s: Op, c: Channel, number: int) -> Access:
    if number > s.first and not s.checked:
        return False
    return number < c.ring or (yield from reached(c, "out", number - c.ring + 1))


def may_read(s: Op, c: Channel, number: int) -> Access:
    if s.two_phase:
        return (yield from reached(c, "reduced", number + 1))
    if s.wait_for(c.rank) < 0:
        return (yield from reached(c, "in", number + 1))
    return (yield "load", s.wait_for(c.rank), "in", number + 1) > number


def reduce_part(s: Op, c: Channel, number: int) -> Access:
    for r in range(c.size):
        yield "read", r, c.slot(number), (s.position, s.is_second, s.reduced), False
    yield "reduced in place", c.slot(number)


def write(s: Op, c: Channel, number: int) -> Access:
    """collectives/: mpp_write_plain and the like."""
    if s.between_devices and s.written:
        yield from pull(s, c)
    elif s.writes(c.rank) and not s.call.withdrawn:
        yield "write", c.slot(number), (s.position, s.is_second, s.written)
    if s.call.peers and not s.written:
        yield "write", c.tensor, (s.position, tensor_of(s))


def tensor_of(s: Op) -> str:
    return "reduced" if s.is_second else "the call's"


def pull(s: Op, c: Channel) -> Access:
    """peers.c: reading begins with the first chunk, and is over before the second one is published."""
    for r in [0] if s.call.kind == "broadcast" else range(c.size):
        yield "read", r, c.tensor, (s.position, tensor_of(s)), False


def read(s: Op, c: Channel, number: int) -> Access:
    """collectives/: read_sum, read_parts and the like. A rank's own data it takes from the user's buffer."""
    if s.between_devices:
        if s.done == 0:
            yield from pull(s, c)
        return
    if not s.reads(c.rank):
        return
    for r in [0] if s.call.kind == "broadcast" else range(c.size):
        if r != c.rank or s.two_phase:
            yield "read", r, c.slot(number), (s.position, s.is_second, s.done), s.two_phase


def advance(s: Op, c: Channel) -> Access:
    moved = False
    number = s.first + s.written
    is_loaded = s.done > 0 or s.written == 0 or not s.between_devices
    if s.written < s.chunks and (yield from may_write(s, c, number)) and is_loaded:
        yield from write(s, c, number)
        s.written += 1
        yield "sign", c.slot(number), (s.position, s.call)
        yield "store", "in", number + 1
        moved = True
    if not s.checked:
        return moved
    number = s.first + s.reduced
    if s.two_phase and s.reduced < s.written and (yield from reached(c, "in", number + 1)):
        yield from reduce_part(s, c, number)
        s.reduced += 1
        yield "store", "reduced", number + 1
        moved = True
    number = s.first + s.done
    if s.done < s.written and (yield from may_read(s, c, number)):
        yield from read(s, c, number)
        s.done += 1
        yield "store", "out", number + 1
        moved = True
    return moved


def mismatch(s: Op, c: Channel) -> Access:
    most = 1
    for r in range(c.size):
        call = yield "signature", r, c.slot(s.first), s.position
        most = max(most, call.chunks)
    return (yield from pass_over(s, c, most))


def take_numbers(s: Op, c: Channel, chunks: int) -> None:
    for later in c.queue if s is c.oom_placeholder else c.queue[c.queue.index(s) + 1 :]:
        later.first += chunks - s.chunks
    c.next += chunks - s.chunks


def pass_over(s: Op, c: Channel, most: int) -> Access:
    take_numbers(s, c, most)
    yield "store", "in", s.first + most
    yield "store", "out", s.first + most
    return FAILED


def check(s: Op, c: Channel) -> Access:
    """Also have_all_come, without the times at which the calls were made: nothing is decided by them."""
    if not s.written or not (yield from reached(c, "in", s.first + 1)):
        return PENDING
    return (yield from mpp_check_calls(s, c))


def mpp_check_calls(s: Op, c: Channel) -> Access:
    for r in range(c.size):
        if (yield "signature", r, c.slot(s.first), s.position).signature != s.call.signature:
            return (yield from mismatch(s, c))
    if s.call.signature == OOM_PLACEHOLDER:
        return (yield from mismatch(s, c))
    if s.call.kind == "exchange":
        yield from plan_exchange(s, c)
    yield from plan_bus(s, c)
    s.checked = True
    return PENDING


def plan_exchange(s: Op, c: Channel) -> Access:
    """Where it goes through the slots."""
    longest = 1
    for r in range(c.size):
        call = yield "signature", r, c.slot(s.first), s.position
        longest = max(longest, call.chunks)
    take_numbers(s, c, longest)
    s.planned = longest


def plan_bus(s: Op, c: Channel) -> Access:
    on_bus, peers, halves, at_once = False, True, True, False
    for r in range(c.size):
        call = yield "signature", r, c.slot(s.first), s.position
        on_bus |= call.bus
        peers &= call.peers
        halves &= call.halves
        at_once |= call.at_once
    if not on_bus:
        return
    s.between_devices, s.is_half = peers, halves
    s.in_parts = s.call.kind in ("all_reduce", "reduce")
    chunks = 2 if peers else 1 if at_once else 1 + s.chunks // 2
    take_numbers(s, c, chunks)
    s.planned = chunks
    if halves:
        second = c.queue[1]
        second.between_devices = peers
        take_numbers(second, c, 2)
        second.planned = 2


def move(s: Op, c: Channel) -> Access:
    yield from advance(s, c)
    if not s.checked and (yield from check(s, c)) == FAILED:
        return FAILED
    return DONE if s.done == s.chunks else PENDING


def step(s: Op, c: Channel) -> Access:
    if s.is_second and not s.planned:
        return  # nobody has begun it
    if c.aborted:
        state = CANCELLED
    elif c.oom_first:
        return
    else:
        state = yield from move(s, c)
    if state == PENDING:
        return
    goes_on = s.is_half and not s.is_second and state == DONE
    if s.between_devices and state == DONE and not goes_on:
        yield "write", c.tensor, (s.position, "the user's")
    c.queue.pop(0)
    c.oom_first = s.oom_after
    if s.call.halves and not s.is_second and not goes_on:
        c.oom_first = c.queue.pop(0).oom_after
    if not goes_on:
        c.outcomes.append(state)


def step_oom_placeholder(s: Op, c: Channel) -> Access:
    while c.oom_first and not c.aborted:
        s.first = yield "own", "out"
        s.position = len(c.outcomes)
        if (yield from move(s, c)) == PENDING:
            return
        s.written = s.done = 0
        c.oom_first -= 1
        c.oom_total -= 1
        c.outcomes.append(MEMORY)
    if c.oom_total and not c.aborted:
        return
    c.oom_total = 0


def mpp_shm_out_of_memory(c: Channel) -> None:
    c.oom_total += 1
    if c.queue:
        c.queue[-1].oom_after += 1
    else:
        c.oom_first += 1
    c.next += 1


def mpp_enqueue_shm(s: Op, c: Channel) -> None:
    s.first = c.next
    c.next += s.chunks
    c.queue.append(s)
    if s.call.halves and not s.is_second:
        mpp_enqueue_shm(Op(s.position, s.call, checked=True, is_half=True, is_second=True), c)


def start(c: Channel, call: Call) -> None:
    """A call of the program: takes its place in the order."""
    if call.oom:
        mpp_shm_out_of_memory(c)
    else:
        mpp_enqueue_shm(Op(c.called, call), c)
    c.called += 1


def progress_all(c: Channel) -> Access:
    """polling.c: whichever operation can move."""
    if c.queue:
        yield from step(c.queue[0], c)
    if c.oom_total:
        yield from step_oom_placeholder(c.oom_placeholder, c)


def copy(c: Channel) -> Channel:
    return replace(
        c,
        known=dict(c.known),
        queue=[replace(s) for s in c.queue],
        oom_placeholder=replace(c.oom_placeholder),
        outcomes=list(c.outcomes),
    )


def frozen(c: Channel) -> tuple:
    """All of a rank's own state, to compare."""
    ops = tuple((s.position, *[*vars(s).values()][2:]) for s in [*c.queue, c.oom_placeholder])
    return (c.next, *c.known.values(), ops, c.oom_first, c.oom_total, c.aborted, c.called, *c.outcomes)
