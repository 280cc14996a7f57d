"""Random programs: operations in several groups, from several threads, of all sizes, waited for in all ways.

The ranks draw what is to be called from one generator each with the same seed, and how to wait and how long to dawdle
from generators of their own. Run under mpiexec:

    programs.py SECONDS [SEED]          as many operations as fit, every result compared; prints how many
    programs.py SECONDS SEED RANK AT    the same, and RANK kills itself after AT seconds
"""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", category=FutureWarning)

THREADS = 2
#: Operations between two looks at the clock, which the ranks take together.
ROUND = 50
COUNTS = (0, 1, 3, 100, 1001, 8193, 20_000, 70_001)
MOST_PENDING = 8
#: The last works of all threads.
begun: deque[Any] = deque(maxlen=4)

Wait = Callable[[], str]


class Stream:
    """One thread's operations on its own groups."""

    def __init__(self, index: int, groups: list[Any], seed: int) -> None:
        self.groups = groups
        self.seed = f"{seed} {index}"
        self.choose = random.Random(self.seed)
        self.dawdle = random.Random(f"{seed} {index} {dist.get_rank()}")
        self.pending: list[tuple[str, Wait]] = []
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self.turn = 0

    def run(self, operations: int) -> None:
        """Some operations, and then wait for all."""
        for _ in range(operations):
            self.turn += 1
            self.choose.seed(f"{self.seed} {self.turn}")  # a turn that is not for this rank must change nothing
            if self.dawdle.random() < 0.02:
                time.sleep(self.dawdle.random() * 0.01)
            name = self.choose.choice(list(OPERATIONS))
            group, count = self.choose.choice(self.groups), self.choose.choice(COUNTS)
            if group is None:
                continue
            asynchronous = self.dawdle.random() < 0.5
            self.pending.append(
                (f"{name} {count} turn {self.turn}", OPERATIONS[name](self, group, count, asynchronous))
            )
            self.done[name] += 1
            while self.pending and (not asynchronous or len(self.pending) > MOST_PENDING):
                self.finish(self.dawdle.randrange(len(self.pending)))
        while self.pending:
            self.finish(0)

    def finish(self, at: int) -> None:
        name, wait = self.pending.pop(at)
        if wrong := wait():
            self.problems.append(f"{name}: {wrong}")

    def value(self, rank: int) -> float:
        """What a rank contributes to this turn: small enough that sums are exact."""
        return float((self.turn * 7 + rank * 13) % 101)


def waiting(stream: Stream, work: Any, tensor: torch.Tensor, wanted: Any) -> Wait:
    """Wait for ``work`` in one of the ways there are; what is wrong with the result."""
    how = stream.dawdle.choice(("wait", "poll", "future", "wait"))
    if work is not None:
        begun.append(work)

    def wait() -> str:
        if work is not None:
            while how == "poll" and not work.is_completed():
                time.sleep(0)
            if how == "future":
                work.get_future().wait()
            work.wait()
        right = torch.full_like(tensor, wanted) if isinstance(wanted, float) else wanted
        return (
            ""
            if torch.equal(tensor, right)
            else f"{tensor.flatten()[:3].tolist()} in place of {right.flatten()[:3].tolist()}"
        )

    return wait


def laid_out(stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is contiguous, or is not."""
    return torch.stack([tensor, tensor], -1)[..., 0] if stream.dawdle.random() < 0.3 else tensor.clone()


def all_reduce(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    ranks = range(dist.get_world_size(group))
    dtype = stream.choose.choice((torch.float32, torch.float64, torch.int64, torch.bfloat16))
    values = [stream.value(rank) % (9 if dtype is torch.bfloat16 else 101) for rank in ranks]
    tensor = laid_out(stream, torch.full((count,), values[dist.get_rank(group)], dtype=dtype))
    work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
    return waiting(stream, work, tensor, float(sum(values)))


def broadcast(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    root = stream.choose.randrange(dist.get_world_size(group))
    tensor = laid_out(stream, torch.full((count,), stream.value(dist.get_rank(group))))
    work = dist.broadcast(tensor, group_src=root, group=group, async_op=asynchronous)
    return waiting(stream, work, tensor, stream.value(root))


def all_gather(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    output = torch.zeros(size, count)
    work = dist.all_gather_into_tensor(
        output, torch.full((count,), stream.value(rank)), group=group, async_op=asynchronous
    )
    wanted = torch.tensor([stream.value(r) for r in range(size)])[:, None].expand(size, count)
    return waiting(stream, work, output, wanted)


def reduce_scatter(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    output = torch.zeros(count)
    inputs = torch.cat([torch.full((count,), stream.value(rank) + to) for to in range(size)])
    work = dist.reduce_scatter_tensor(output, inputs, group=group, async_op=asynchronous)
    return waiting(stream, work, output, float(sum(stream.value(r) + rank for r in range(size))))


def all_to_all(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    output = torch.zeros(size, count)
    inputs = torch.tensor([stream.value(rank) + to for to in range(size)])[:, None].expand(size, count).contiguous()
    work = dist.all_to_all_single(output, inputs, group=group, async_op=asynchronous)
    wanted = torch.tensor([stream.value(r) + rank for r in range(size)])[:, None].expand(size, count)
    return waiting(stream, work, output, wanted)


def barrier(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    return waiting(stream, dist.barrier(group, async_op=asynchronous), torch.zeros(1), 0.0)


def ring(stream: Stream, group: Any, count: int, asynchronous: bool) -> Wait:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    left, tensor, tag = (rank - 1) % size, torch.full((count,), -1.0), stream.turn % 1000
    sent = torch.full((count,), stream.value(rank))
    work = dist.irecv(tensor, group=group, group_src=left, tag=tag)
    dist.isend(sent, group=group, group_dst=(rank + 1) % size, tag=tag)
    return waiting(stream, work, tensor, stream.value(left))


OPERATIONS: dict[str, Callable[[Stream, Any, int, bool], Wait]] = {
    operation.__name__: operation
    for operation in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier, ring)
}


def make_groups(timeout: timedelta) -> list[list[Any]]:
    """For each thread the world again, and some of the ranks; None where this one is not in a group."""
    others = list(range(1, dist.get_world_size()))
    found = [[dist.new_group(ranks, timeout=timeout) for ranks in (None, others)] for _ in range(THREADS)]
    return [[None if group == dist.GroupMember.NON_GROUP_MEMBER else group for group in made] for made in found]


def run_round(streams: list[Stream]) -> None:
    ends = queue.SimpleQueue[BaseException | None]()

    def run(stream: Stream) -> None:
        try:
            stream.run(ROUND)
        except BaseException as error:
            ends.put(error)
        else:
            ends.put(None)

    for stream in streams:
        threading.Thread(target=run, args=(stream,), daemon=True).start()
    for _ in streams:
        # The first failure ends the process: its other threads may wait for threads elsewhere that have failed too.
        if (failure := ends.get()) is not None:
            raise failure


def goes_on(until: float) -> bool:
    """Whether there is time for another round, in rank 0's opinion."""
    answer = torch.tensor([int(time.monotonic() < until)])
    dist.broadcast(answer, 0)
    return bool(answer.item())


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.set_num_threads(1)
    kills = len(sys.argv) > 4
    # torch's barrier after new_group waits to the deadline for a rank that has died; so does who is on another node.
    timeout = timedelta(seconds=15 if kills else 60)
    dist.init_process_group("mpiplus", timeout=timeout)
    if kills and dist.get_rank() == int(sys.argv[3]):
        threading.Timer(float(sys.argv[4]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    until, rounds, done, groups_made, problems = time.monotonic() + seconds, 0, Counter[str](), 0, []
    while goes_on(until) and not problems:
        made = make_groups(timeout)  # new ones now and then: they too come and go
        streams = [Stream(index, groups, seed * 1000 + rounds) for index, groups in enumerate(made)]
        for _ in range(4):
            run_round(streams)
            rounds += 1
        for stream in streams:
            done.update(stream.done)
            problems += stream.problems
        for group in [group for groups in made for group in groups if group is not None]:
            dist.destroy_process_group(group)
            groups_made += 1
    for problem in problems[:10]:
        print(f"rank {dist.get_rank()}: {problem}", flush=True)
    if dist.get_rank() == 0 or problems:
        print(f"soak: {sum(done.values())} operations {dict(done)}, {groups_made} groups, seed {seed}, "
              f"{len(problems)} problems", flush=True)  # fmt: skip
    dist.destroy_process_group()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
