"""``mpiplus bench --train``: small networks trained in several ways, each on several backends in turns.

How long a step waits for communication, and how much of that goes on behind the backward pass, cannot be seen from
within, so these are timed in turns:

- a step;
- a step "alone": it does all but communicate. DDP copies gradients into its buckets and back, but what should
  communicate gives each bucket back as it is; other ways have a group that sends nothing. A barrier at the end lets
  fast ranks wait for slow ones, as they do in a step. (Not under ``no_sync()``, where there are no buckets: what DDP's
  copies cost would count as waiting for communication.)
- with DDP the all_reduce of all buckets, at once and with nothing else to do.

What a step takes longer than one alone, it waits for communication, or lacks the core that this takes. What the
all_reduce takes and the step does not get longer by has been hidden. The ways are in ``ways.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist

from ..device import Device
from ..files import Files, draw_training
from ..front_end import AloneGroup
from ..measure import Call, take_turns
from ..operations import DTYPES
from ..report import print_facts
from ..session import RefusedError, Session, new_groups, open_session
from .models import Task
from .results import Row, Trained, print_rows, what_is_wrong
from .ways import Place, Training, Way, choose, left_out, planned

_CHECKED_STEPS = 6
#: After the first one DDP makes its buckets anew, in the order in which gradients came.
_STEPS_TO_SETTLE = 3
_ALONE, _ALL_REDUCE = "alone", "all_reduce"


def _check(session: Session, trainings: dict[str, Training], title: str, dtype: str) -> dict[str, list[float]]:
    """Train the first steps on every backend; the mean of all ranks' losses.

    Raises:
        click.ClickException: they are not those of one training. Every rank raises it.
        RefusedError: a backend does not do what this training asks of it.
    """
    losses, drifts = {}, {}
    for name, training in trainings.items():
        start = training.parameters()
        own = session.on_all(partial(_first_losses, training), f"{name}: ")
        losses[name] = [sum(of_ranks) / session.size for of_ranks in zip(*session.comm.allgather(own), strict=True)]
        end = training.parameters()
        of_rank_0 = torch.from_numpy(session.comm.bcast(end.numpy()))
        way = float((of_rank_0 - start).norm())
        drifts[name] = session.slowest(float((end - of_rank_0).norm()) / way if len(end) else 0.0)
    if problem := what_is_wrong(losses, drifts, dtype):
        raise click.ClickException(f"{title}: {problem}")
    return losses


def _first_losses(training: Training) -> list[float]:
    return [float(training.step()) for _ in range(_CHECKED_STEPS)]


def _all_reduce_of(group: dist.ProcessGroup, lengths: Sequence[int], dtype: torch.dtype, device: Device) -> Call:
    """Return a call that makes the all_reduces of DDP's buckets in one step, all at once."""
    buckets = [device.tensor(length, dtype) for length in lengths]

    def call() -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return call


def _measure(
    session: Session, alone_group: dist.ProcessGroup, way: Way, task: Task, dtype: str, repeats: int, seconds: float
) -> Row:
    """Train one network in one way on all backends in turns; raises what :func:`_check` does."""
    silent = filter(None, map(session.why_no_messages, session.groups if way.sends else ()))
    if way.most_ranks and session.size > way.most_ranks:
        raise RefusedError(f"{session.size} ranks are more than its {way.most_ranks} layers")
    if reason := next(silent, ""):
        raise RefusedError(reason)
    kind, (first, *_), device = DTYPES[dtype], session.groups.values(), session.device
    trainings = {
        name: session.on_all(partial(way.make, Place(task, kind, group, group, device=device)), f"{name}: ")
        for name, group in session.groups.items()
    }
    alone = session.on_all(partial(way.make, Place(task, kind, alone_group, first, True, device)), f"{_ALONE}: ")
    losses = _check(session, trainings, f"{way.name}, {task.name} of {dtype}", dtype)
    for training in (alone, *trainings.values()):
        training.stand_still()
    for _ in range(_STEPS_TO_SETTLE):
        alone.step()
    lengths = list(alone.buckets)

    def step_alone() -> None:
        alone.step()
        session.synchronise()

    calls: dict[str, Call] = {_ALONE: step_alone}
    for name, training in trainings.items():
        calls[name] = training.step
        if lengths:
            calls[f"{name} {_ALL_REDUCE}"] = _all_reduce_of(session.groups[name], lengths, kind, device)
    turns = take_turns(calls, repeats, seconds, session)
    trained = {
        name: Trained(alone.samples, turns[name], turns[_ALONE], turns.get(f"{name} {_ALL_REDUCE}"), losses[name])
        for name in trainings
    }
    return Row(way.name, task.name, dtype, [length * kind.itemsize for length in lengths], trained)


def run(given: Mapping[str, Any], backends: Sequence[str], files: Files) -> None:
    """Measure the ways that the command was given, print the table, and write it where files are named."""
    ways, quick = choose(given["ways"]), given["quick"]
    turns, block_seconds = given["repeats"] or (7 if quick else 21), 0.04 if quick else 0.1
    rows: list[Row] = []
    notes: list[str] = []
    with open_session([], partial(new_groups, backends, False), files.why_not, given["device"]) as session:
        alone_group = AloneGroup.of_all_ranks()
        threads = f"{torch.get_num_threads()} (OMP_NUM_THREADS)"
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
            threads = "1 (OMP_NUM_THREADS sets another number)"
        facts = {**session.facts(), "threads of a rank": threads}
        console = print_facts(session.rank, facts, "mpiplus bench --train")
        for way, task, dtype in planned(ways, quick, given["samples"]):
            try:
                rows.append(_measure(session, alone_group, way, task, dtype, turns, block_seconds))
            except RefusedError as error:
                notes.append(f"{way.name}, {task.name} of {dtype} is left out: {error}")
    if quick:
        notes += left_out(ways)
    print_rows(console, rows, notes)
    if files.json and session.rank == 0:
        settings = {"backends": backends, "repeats": turns, "block_seconds": block_seconds, "quick": quick}
        found = {"facts": facts, "settings": settings, "training": [row.to_json() for row in rows], "notes": notes}
        files.json.write_text(json.dumps(found, indent=2) + "\n")
    if files.plot and session.rank == 0:
        draw_training(rows, facts, files.plot)
