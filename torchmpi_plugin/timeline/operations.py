"""The operations of a job, of all ranks on one clock: who came when, and for whom the others waited.

Imports neither torch nor MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import rows
from .rows import Recorded

Numbers = np.ndarray[Any, Any]

#: Of two ranks each; any other operation all ranks of the group call.
MESSAGES = ("send", "recv")


@dataclass
class Job:
    """Its operations, a place in each array for each: times in ns of rank 0's clock, ranks of the world.

    Attributes:
        rank, begun, complete: whose it is, when that rank called it, and when it was complete there; or when the
            record ends, where ``is_open``.
        came, last: when the last of its ranks had come, and which that was; -1: that is not known.
        asked: when the caller waited for it; 0: it did not, or by a future.
        kind: its place in ``kinds``, which have ``name``, ``dtype``, ``op``, ``file``, ``line`` and ``group``.
        peer: of a message.
        arrows: from one operation to another by their places: the last to come to those that waited, and messages.
        errors: by node how wrong its clock may be, in ns; None: it was not compared.
        dropped: by rank how many of its calls are not recorded any more.
        steps: by rank the numbers of its optimizer's steps, and when they were made.
        reached: what plain messages reached: "messages" has ns by bytes, as text, "with" the other rank; or empty.
    """

    ranks: list[dict[str, Any]]
    kinds: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[int, int | None] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    columns: dict[str, Numbers] = field(default_factory=dict)
    arrows: list[tuple[int, int]] = field(default_factory=list)
    steps: dict[int, tuple[Numbers, Numbers]] = field(default_factory=dict)
    reached: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Numbers:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def start(self) -> int:
        """The time at which the first operation began."""
        return int(self.begun.min(initial=2**62)) if len(self.begun) else 0

    @property
    def waits(self) -> Numbers:
        """Of each operation, for how long it waited for the last rank."""
        return self.came - self.begun

    def of_kinds(self, what: str) -> Numbers:
        """Of each operation what its kind says."""
        return np.array([kind[what] for kind in self.kinds] or [0])[self.kind]


#: Shorter waits have no arrow, nor do those that were over before the last one came, as by a clock that is off.
_ARROW_NS = 10_000


def in_directory(directory: Path) -> Job:
    """The latest job whose ranks have recorded there; a FileNotFoundError: none has, a ValueError: it is damaged."""
    jobs = rows.jobs_in(directory)
    if not jobs:
        raise FileNotFoundError(f"{directory} has no calls of ranks that ran with MPIPLUS_TIMELINE={directory}")
    name, paths = list(jobs.items())[-1]
    try:
        return of([rows.read(path) for path in paths])
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the files of job {name} in {directory} are damaged: {error!r:.200}") from error


def of(recorded: Sequence[Recorded]) -> Job:
    recorded = sorted(recorded, key=lambda each: int(each.about["rank"]))
    job = Job([each.about for each in recorded], reached=recorded[0].reached)
    groups: dict[Any, int] = {}
    parts = [_columns(job, each, recorded[0], groups) for each in recorded]
    job.columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    job.dropped = {each.about["rank"]: each.dropped for each in recorded if each.dropped > 0}
    _close(job)
    _join_collectives(job)
    _join_messages(job)
    np.clip(job.came, job.begun, np.maximum(job.complete, job.begun), out=job.came)
    return job


def _columns(job: Job, recorded: Recorded, first: Recorded, groups: dict[Any, int]) -> dict[str, Numbers]:
    """Of one rank: on the job's clock, with the job's numbers of kinds and ranks."""
    about, found = recorded.about, recorded.rows
    kinds, members = np.zeros(max(recorded.kinds, default=0) + 1, "i8"), {}
    for number, kind in recorded.kinds.items():
        group = recorded.groups[kind["of"]]
        name, ranks = group["name"], tuple(group["ranks"])
        kinds[number] = len(job.kinds)
        members[len(job.kinds)] = np.array([*ranks, -1])
        of_group = {"group": name, "ranks": ranks, "number": groups.setdefault((name, ranks), len(groups))}
        job.kinds.append({**kind, **of_group})
    found = found[found["kind"] < len(kinds)]
    same = ("begun", "complete", "asked", "sequence", "bytes", "tag")
    columns = {name: found[name].astype("i8") for name in same}
    columns |= {"kind": kinds[found["kind"]], "came": found["last_came"], "rank": np.full(len(found), about["rank"])}
    for name in ("last", "peer"):
        columns[name] = np.full(len(found), -1)
        for at, of_world in members.items():
            mine = columns["kind"] == at
            columns[name][mine] = of_world[np.clip(found[name][mine], -1, len(of_world) - 2)]
    shift = _shift(job, about, first)
    steps = recorded.steps["begun"].astype("i8")
    job.steps[about["rank"]] = recorded.steps["sequence"], steps - shift(steps)
    for name in ("begun", "came", "complete", "asked"):
        columns[name] = np.where(columns[name] > 0, columns[name] - shift(columns[name]), 0)
    return columns


def _shift(job: Job, about: dict[str, Any], first: Recorded) -> Any:
    """Return how far a node's clock is ahead of rank 0's, by its own time: between two measurements evenly."""
    measured = [each for each in first.clocks if each["clock"] == about["node"]]
    if about["node"] == first.about["node"]:
        job.errors[about["node"]] = 0
        return lambda times: 0
    if not measured:
        job.errors[about["node"]] = None
        return lambda times: first.about["epoch"] - about["epoch"]
    job.errors[about["node"]] = max(each["error"] for each in measured)
    offsets = np.array([each["offset"] for each in measured])
    at = offsets + [each["at"] for each in measured]
    return lambda times: offsets[0] + np.interp(times - at[0], at - at[0], offsets - offsets[0]).astype("i8")


def _close(job: Job) -> None:
    columns = job.columns
    columns["is_open"] = columns["complete"] == 0
    end = max((int(columns[name].max(initial=0)) for name in ("begun", "complete", "came", "asked")), default=0)
    columns["complete"] = np.where(columns["is_open"], end, columns["complete"])
    is_known = columns["came"] > columns["begun"]
    columns["came"] = np.where(is_known, columns["came"], columns["begun"])
    columns["last"] = np.where(is_known, columns["last"], -1)


def _join_collectives(job: Job) -> None:
    """Find the last rank by the clocks where all ranks of a group have recorded a call, whatever each has seen."""
    if not job.kinds:
        return
    names = {name: number for number, name in enumerate(dict.fromkeys(kind["name"] for kind in job.kinds))}
    name = np.array([names[kind["name"]] for kind in job.kinds])[job.kind]
    group, size = job.of_kinds("number"), np.array([len(kind["ranks"]) for kind in job.kinds])[job.kind]
    order = np.lexsort((job.begun, job.sequence, name, group))
    order = order[~np.isin(name[order], [names.get(message, -1) for message in MESSAGES])]
    keys = np.stack([group[order], name[order], job.sequence[order]])
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])[: len(order)])
    counts = np.diff([*starts, len(order)])
    is_whole = counts == size[order[starts]] if len(starts) else np.zeros(0, bool)
    lasts = np.repeat(order[starts + counts - 1], counts)
    joined, lasts = order[np.repeat(is_whole, counts)], lasts[np.repeat(is_whole, counts)]
    job.came[joined], job.last[joined] = job.begun[lasts], job.rank[lasts]
    waited = (job.begun[lasts] - job.begun[joined] >= _ARROW_NS) & (job.complete[joined] >= job.begun[lasts])
    job.arrows += zip(lasts[waited].tolist(), joined[waited].tolist(), strict=True)


def _join_messages(job: Job) -> None:
    """The n-th message from one rank to another in a group with a tag is the n-th that is received there.

    In the order in which they were queued, whichever thread called; messages from anybody have their sender by now. No
    pair is made where that does not tell: of ranks whose first calls are not recorded; behind a receive from anybody
    that is not complete, which may have taken a message; and from where the lengths differ.
    """
    ends: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}
    unknown: set[tuple[Any, ...]] = set()
    is_message = np.isin(job.of_kinds("name"), MESSAGES) if job.kinds else np.zeros(0, bool)
    found = np.flatnonzero(is_message)
    for at in found[np.argsort(job.sequence[found], kind="stable")].tolist():
        kind, rank, peer, tag = job.kinds[job.kind[at]], *(int(job.columns[n][at]) for n in ("rank", "peer", "tag"))
        receiver = kind["number"], rank, tag
        sends = kind["name"] == "send"
        if not sends and job.is_open[at] and peer < 0:
            unknown.add(receiver)
        if peer < 0 or rank in job.dropped or peer in job.dropped or (not sends and receiver in unknown):
            continue
        ends.setdefault((*receiver[::2], *((rank, peer) if sends else (peer, rank))), ([], []))[not sends].append(at)
    for (*_, source, _), (sent, received) in ends.items():
        for send, recv in zip(sent, received, strict=False):
            if job.bytes[send] != job.bytes[recv]:
                break
            if job.begun[send] > job.begun[recv]:
                job.came[recv], job.last[recv] = job.begun[send], source
            if job.complete[recv] >= job.begun[send]:
                job.arrows.append((send, recv))
