"""Random programs of messages and collectives that must complete, as MPI's rules have it, do so with the right values.

The seed is where the dice begin.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import inside
import pytest
import sampling
import torch
import torch.distributed as dist
from groups import API_MODE
from message_model import ANY, COLLECTIVE, RECEIVE, SEND, WAIT, Program, Step, draw_complete
from patience import patient
from placements import PLACEMENTS, Placed

pytestmark = [pytest.mark.skipif(API_MODE != "direct", reason="asks the group itself"), pytest.mark.timeout(1800)]
SEED = sampling.seed()
PROGRAMS = sampling.count(3000, 80)
SECONDS = patient(10)  # until a program counts as one that hangs
#: Elements of all messages of a program: those that MPI sends at once, and those that wait for their receiver.
COUNTS = (4, 4, 40_000)


class Run:
    """One program on this rank."""

    def __init__(self, steps: tuple[Step, ...], group: Any, count: int, dice: random.Random) -> None:
        self.steps, self.group, self.count, self.dice = steps, group, count, dice
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.works: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.wanted: dict[int, torch.Tensor] = {}
        self.keep: list[Any] = []
        self.sent: Counter[tuple[int, int]] = Counter()

    def message(self, sender: int, number: int, tag: int) -> torch.Tensor:
        return torch.full((self.count,), sender * 1000 + tag * 100 + number)

    def begin(self, at: int, step: Step) -> None:
        if step.kind == SEND:
            tensor = self.message(self.rank, self.sent[step.peer, step.tag], step.tag)
            self.sent[step.peer, step.tag] += 1
            self.keep.append(tensor)
            self.works[at] = dist.isend(tensor, group=self.group, group_dst=step.peer, tag=step.tag)
        elif step.kind == RECEIVE:
            self.tensors[at] = torch.full((self.count,), -1)
            source = {} if step.peer == ANY else {"group_src": step.peer}
            self.works[at] = dist.irecv(self.tensors[at], group=self.group, tag=step.tag, **source)
        else:
            self.collective(at, step.name)

    def collective(self, at: int, name: str) -> None:
        turn = sum(step.kind == COLLECTIVE for step in self.steps[:at])
        mine, everybody = torch.tensor([turn * 10 + self.rank]), turn * 10 + torch.arange(self.size)
        output, root, named = torch.zeros(self.size, dtype=torch.int64), turn % self.size, {"group": self.group}
        named["async_op"] = True
        if name == "all_to_all_single":
            self.works[at] = dist.all_to_all_single(output, mine.repeat(self.size), **named)
            self.tensors[at], self.wanted[at] = output, everybody
        elif name == "scatter":
            given = list(everybody.split(1)) if self.rank == root else None
            self.works[at] = dist.scatter(output[:1], given, group_src=root, **named)
            self.tensors[at], self.wanted[at] = output[:1], mine
        elif name == "gather":
            outputs = list(output.split(1)) if self.rank == root else None
            self.works[at] = dist.gather(mine, outputs, group_dst=root, **named)
            self.tensors[at], self.wanted[at] = output, everybody if self.rank == root else torch.zeros_like(output)
        elif name == "all_reduce":
            self.works[at] = dist.all_reduce(mine, **named)
            self.tensors[at], self.wanted[at] = mine, everybody.sum().reshape(1)
        elif name == "all_gather":
            self.works[at] = dist.all_gather(list(output.split(1)), mine, **named)
            self.tensors[at], self.wanted[at] = output, everybody
        else:
            self.works[at] = dist.barrier(**named)
        self.keep.append(mine)

    def run(self) -> None:
        for at, step in enumerate(self.steps):
            if self.dice.random() < 0.2:
                time.sleep(self.dice.random() * 0.002)
            if step.kind == WAIT:
                self.works[step.at].wait()
            else:
                self.begin(at, step)

    def problems(self) -> list[str]:
        """What is wrong with the results: of the messages from one rank with one tag, each receive has the next."""
        found, received = [], Counter[tuple[int, int]]()
        for at, step in enumerate(self.steps):
            if at in self.wanted and not torch.equal(self.tensors[at], self.wanted[at]):
                found.append(
                    f"step {at}, {step.name}: {self.tensors[at].tolist()} in place of {self.wanted[at].tolist()}"
                )
            if step.kind != RECEIVE:
                continue
            source = self.works[at]._source_rank()
            right = self.message(source, received[source, step.tag], step.tag)
            received[source, step.tag] += 1
            if not torch.equal(self.tensors[at], right):
                found.append(f"step {at} got {self.tensors[at][0]} of rank {source} in place of {right[0]}")
        return found


def failure_of(program: Program, group: Any, count: int, seed: str, channel: Any) -> str:
    """What went wrong on any rank; all ranks hear the same."""
    rank = dist.get_rank(group)
    run = Run(program[rank], group, count, random.Random(f"{seed} {rank}"))
    try:
        run.run()
        problem = "; ".join(run.problems())
    except dist.DistBackendError as error:
        problem = str(error)[:300]
    said = channel.allgather(problem)
    return "\n".join(f"rank {rank}: {problem}" for rank, problem in enumerate(said) if problem)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_random_programs(placement: str, world, placed: Placed, channel) -> None:
    group = placed(placement).process_group
    inside.set_timeout(group, timedelta(seconds=SECONDS))
    for number in range(PROGRAMS):
        seed = f"{SEED} {world.size} {placement} {number}"
        dice = random.Random(seed)
        program, count = draw_complete(dice, world.size), dice.choice(COUNTS)
        if why := failure_of(program, group, count, seed, channel):
            pytest.fail(f"program {number} of seed {SEED}, {count} elements:\n{program}\n{why}")


# ---- programs that hung ----

W0, W1, W2 = (Step(WAIT, at=at) for at in range(3))
A2A = Step(COLLECTIVE, name="all_to_all_single")
MUST: dict[str, Program] = {
    "a message beside a collective that its receiver calls later": (
        (A2A, Step(SEND, 1), W1, W0),
        (Step(RECEIVE, 0), W0, A2A, W2),
    ),
    "from anyone behind one that comes later": (
        (Step(RECEIVE, 1), Step(RECEIVE, ANY), W1, Step(SEND, 1), W0),
        (Step(RECEIVE, 0), W0, Step(SEND, 0)),
        (Step(SEND, 0), W0),
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", MUST)
def test_programs_that_hung(name: str, placement: str, world, placed: Placed, channel) -> None:
    program = MUST[name]
    if len(program) > world.size:
        pytest.skip("needs more ranks")
    others = tuple((A2A, W0) for _ in range(world.size - len(program))) if A2A in program[0] else ()
    program = (*program, *others, *(() for _ in range(world.size - len(program) - len(others))))
    group = placed(placement).process_group
    inside.set_timeout(group, timedelta(seconds=SECONDS))
    assert failure_of(program, group, 4, name, channel) == ""


@pytest.mark.mpi(min_size=2)
def test_more_exchanges_than_tags(world, placed: Placed, channel) -> None:
    """Over MPI's own collectives two exchanges that are 511 apart have one tag, and must not take each other's data."""
    group = placed("MPI").process_group
    numbers = range(700)
    outputs = [torch.zeros(world.size, dtype=torch.int64) for _ in numbers]
    works = []
    if world.rank:
        channel.Barrier()  # rank 0 has called them all
    for number in numbers:
        if world.rank and number < 180:
            time.sleep(0.002)  # while rank 0 looks for messages
        mine = torch.full((world.size,), 1000 * world.rank + number)
        works.append(dist.all_to_all_single(outputs[number], mine, group=group, async_op=True))
    if world.rank == 0:
        channel.Barrier()
    for work in works:
        work.wait()
    wanted = [[1000 * rank + number for rank in range(world.size)] for number in numbers]
    assert [output.tolist() for output in outputs] == wanted
