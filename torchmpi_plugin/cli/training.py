"""``mpiplus bench --train``: small networks trained with DistributedDataParallel, on several backends in turns.

How long a step waits for communication, and how much of that goes on behind the backward pass, cannot be seen from
within, so three things are timed in turns:

- a step;
- a step "alone": DDP copies gradients into its buckets and back, but what should communicate gives each bucket back
  as it is; a barrier at the end lets fast ranks wait for slow ones, as they do in a step. (Not under ``no_sync()``,
  where there are no buckets: what DDP's copies cost would count as waiting for communication.)
- the all_reduce of all buckets, at once and with nothing else to do.

What a step takes longer than one alone, it waits for communication, or lacks the core that this takes. What the
all_reduce takes and the step does not get longer by has been hidden.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from ..host import node
from .files import Files
from .measure import Call
from .models import TASKS, Task
from .operations import DTYPES
from .report import open_console, print_facts
from .session import Session, new_groups, open_session
from .training_results import Row, Trained, print_rows, what_is_wrong

#: Of DDP's buckets: so that networks this small have several, as large ones have of torch's 25 MiB.
_BUCKET_MIB = 1
_CHECKED_STEPS = 6
#: After the first one DDP makes its buckets anew, in the order in which gradients came.
_STEPS_TO_SETTLE = 3
_SEED = 11
_ALONE, _ALL_REDUCE = "alone", "all_reduce"


class TrainingError(Exception):
    """A backend trains, but not as it should. Every rank raises it."""


class Trainer:
    """A network on one backend, with this rank's batch.

    Args:
        task: which network.
        dtype: of its parameters and data.
        group: the process group.
    """

    def __init__(self, task: Task, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        torch.manual_seed(_SEED)
        self._group = group
        network = task.make().to(dtype)
        self.model = DistributedDataParallel(network, process_group=group, bucket_cap_mb=_BUCKET_MIB)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=task.learning_rate, momentum=0.9)
        dice = torch.Generator().manual_seed(_SEED + 1 + dist.get_rank(group))
        self._data, self._targets = task.batch(dice, task.samples, dtype)

    def step(self) -> Tensor:
        """Train one step; the loss before it."""
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self._data).float(), self._targets)
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        self._optimizer.step()
        return loss.detach()

    def stand_still(self) -> None:
        """From now on steps take as long and change nothing: many on one batch end in numbers no training has."""
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0

    def parameters(self) -> Tensor:
        """Return a copy of all of them, as one vector of float64."""
        return parameters_to_vector(self.model.parameters()).detach().double()

    def keep_to_itself(self) -> list[int]:
        """From now on DDP communicates nothing; the elements of its buckets, in the order of their all_reduce."""
        lengths: list[int] = []

        def as_it_is(bucket: Tensor) -> torch.futures.Future[Tensor]:
            lengths.append(bucket.numel())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket)
            return future

        # Not the function itself: DDP takes no annotations that are text, as all are here.
        self.model.register_comm_hook(None, lambda state, bucket: as_it_is(bucket.buffer()))
        for _ in range(_STEPS_TO_SETTLE):
            lengths.clear()
            self.step()
        return list(lengths)


def _check(session: Session, trainers: dict[str, Trainer], model: str, dtype: str) -> dict[str, list[float]]:
    """Train the first steps on every backend; the mean of all ranks' losses.

    Raises:
        TrainingError: they are not those of one training.
    """
    losses, drifts = {}, {}
    for name, trainer in trainers.items():
        start = trainer.parameters()
        own = [float(trainer.step()) for _ in range(_CHECKED_STEPS)]
        losses[name] = [sum(of_ranks) / session.size for of_ranks in zip(*session.comm.allgather(own), strict=True)]
        end = trainer.parameters()
        of_rank_0 = torch.from_numpy(session.comm.bcast(end.numpy()))
        drifts[name] = session.slowest(float((end - of_rank_0).norm() / (of_rank_0 - start).norm()))
    if problem := what_is_wrong(losses, drifts, dtype):
        raise TrainingError(f"{model} of {dtype}: {problem}")
    return losses


def _all_reduce_of(group: dist.ProcessGroup, lengths: Sequence[int], dtype: torch.dtype) -> Call:
    """What DDP asks of the group in one step, all at once."""
    buckets = [torch.empty(length, dtype=dtype).fill_(0) for length in lengths]

    def call() -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return call


def _measure(session: Session, task: Task, dtype: str, repeats: int, block_seconds: float) -> Row:
    kind, (first, *_) = DTYPES[dtype], session.groups.values()
    trainers = {name: Trainer(task, kind, group) for name, group in session.groups.items()}
    losses = _check(session, trainers, task.name, dtype)
    alone = Trainer(task, kind, first)
    lengths = alone.keep_to_itself()

    def step_alone() -> None:
        alone.step()
        session.synchronise()

    calls: dict[str, Call] = {_ALONE: step_alone}
    for name, trainer in trainers.items():
        calls[name] = trainer.step
        calls[f"{name} {_ALL_REDUCE}"] = _all_reduce_of(session.groups[name], lengths, kind)
    for trainer in (alone, *trainers.values()):
        trainer.stand_still()
    seconds = {name: timing.seconds for name, timing in session.measure(calls, repeats, block_seconds).items()}
    samples = task.samples * session.size
    trained = {
        name: Trained(samples, seconds[name], seconds[_ALONE], seconds[f"{name} {_ALL_REDUCE}"], losses[name])
        for name in trainers
    }
    return Row(task.name, dtype, [length * kind.itemsize for length in lengths], trained)


def threads_of_a_rank(own: Sequence[int], of_all_here: Sequence[Sequence[int]]) -> int:
    """Return how many threads a rank can have without taking another's core.

    Args:
        own: the cores that this rank may use.
        of_all_here: those of each rank on this host, this one's among them.
    """
    cores = set().union(*of_all_here)
    return max(1, min(len(own), len(cores) // len(of_all_here)))


def _share_cores(session: Session) -> str:
    """Set the number of torch's threads as a user would; how it was chosen."""
    if "OMP_NUM_THREADS" in os.environ:
        return f"{torch.get_num_threads()} (OMP_NUM_THREADS)"
    here = session.comm.Split_type(MPI.COMM_TYPE_SHARED)
    everybody = here.allgather(node.cores())
    here.Free()
    torch.set_num_threads(threads_of_a_rank(node.cores(), everybody))
    return f"{torch.get_num_threads()} (the cores of a host, divided by its ranks)"


def run(backends: Sequence[str], quick: bool, repeats: int | None, json_file: Path | None) -> None:
    """Measure all networks and dtypes, print the table, and write it to a file if one is named.

    Args:
        backends: the one of interest first.
        quick: shorter and fewer turns.
        repeats: turns, if not the usual number.
        json_file: for the figures.
    """
    turns, block_seconds = repeats or (7 if quick else 21), 0.04 if quick else 0.1
    rows: list[Row] = []
    problem = ""
    groups, hindrance = partial(new_groups, backends, False), Files(json_file, None, None).hindrance
    with open_session([], groups, hindrance) as session:
        console = open_console(session.rank)
        if session.size == 1:
            console.print("One process alone; to measure communication: mpirun -n 2 mpiplus bench --train")
        facts = {**session.facts(), "threads of a rank": _share_cores(session), "DDP buckets": f"{_BUCKET_MIB} MiB"}
        print_facts(console, facts)
        try:
            for task in TASKS:
                rows += [_measure(session, task, dtype, turns, block_seconds) for dtype in DTYPES]
        except TrainingError as error:
            problem = str(error)
    if problem:
        _give_up(problem, session.rank)
    print_rows(console, rows)
    if json_file and session.rank == 0:
        settings = {"backends": list(backends), "repeats": turns, "block_seconds": block_seconds}
        found = {"facts": facts, "settings": settings, "training": [row.to_json() for row in rows]}
        json_file.write_text(json.dumps(found, indent=2) + "\n")


def _give_up(problem: str, rank: int) -> None:
    if rank == 0:
        click.echo(f"Error: {problem}", err=True)
    sys.exit(1)
