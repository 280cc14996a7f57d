"""Reasons why an operation takes so long: who has come, who has gone, and what the others are doing."""

from __future__ import annotations

import json
import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

from .. import settings
from .._bridge import Call
from ..engine.work import PendingWork, in_words
from ..errors import DistBackendError, RankFailedError, attempt
from ..names import NOT_ARRIVED, describe_ranks, log
from ..node import processes
from ..node.processes import Process
from ..store.checkin import CheckIn, Report
from . import comparison, monitor

#: A wait is reported to the other ranks after this share of its time, and at the latest after so many seconds.
_REPORT_SHARE, _REPORT_AFTER = 0.25, 2.0
#: At a deadline, the others' reports are given this long to come in.
_REPORT_GRACE = 0.5
#: Seconds between two looks at who has gone.
_LOOK_EVERY = 1.0
#: A rank that has left is given this long to end the job itself, with its own error and exit code.
LEAVING_GRACE = 3.0
#: So many ranks are asked what they do, and so many different calls are listed.
_ENOUGH = 8
#: So many of those who have come are asked whether they are still there.
_ENOUGH_ARRIVED = 64
#: What may be the matter with a rank that does not answer.
_SILENT = "stopped, dead, cut off, or busy without Python"


def _report_of(call: Call) -> Report:
    return Report(call.sequence, in_words(call), comparison.essence(call))


class Examined(Protocol):
    """A group, as the diagnosis needs it: ``ProcessGroupMPI`` says what each does."""

    @property
    def group_name(self) -> str: ...
    @property
    def last_call(self) -> Call | None: ...
    @property
    def checkin(self) -> CheckIn: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def global_rank(self, rank: int) -> int: ...
    def arrivals(self, work: PendingWork) -> list[int]: ...
    def break_off(self, why: str) -> None: ...
    def take_back(self, work: PendingWork) -> None: ...


class _Answer(NamedTuple):
    """A rank's words about itself, and its last call in this group."""

    words: str
    call: Report | None


class Diagnosis:
    """Of one group. Everything here runs under ``lock``, on the thread that waits or on the background one."""

    def __init__(self, group: Examined, of_ranks: list[Process | None]) -> None:
        self.lock = threading.Lock()
        # Not a cycle: a destroyed group must go at once, and with it the store it holds, whose port may be wanted.
        self._group: Examined = weakref.proxy(group)
        self._processes = of_ranks
        self._looked = 0.0
        self._reported = -1
        self._watchdog = settings.WATCHDOG.value()
        self._quiet_until = 0.0
        self._leaving: dict[int, float] = {}  # since when
        monitor.diagnoses[group.group_name] = self

    def last_call(self) -> Report | None:
        """The last collective that was begun, whether it is complete or not."""
        try:
            last = self._group.last_call
        except ReferenceError:  # the group was dropped, or could not be made
            return None
        return None if last is None else _report_of(last)

    # ---- while an operation waits ----

    def look(self, work: PendingWork) -> Exception | None:
        """Let the others know that ``work`` waits; the error, if it waits for somebody who has gone."""
        group = self._group
        if work.elapsed() < min(_REPORT_AFTER, _REPORT_SHARE * work.seconds):
            return None
        if work.call.peer is None and work.call.sequence > self._reported:
            self._reported = work.call.sequence
            group.checkin.report(_report_of(work.call))
        if time.monotonic() - self._looked < _LOOK_EVERY:
            return None
        self._looked = time.monotonic()
        error = self._gone(work)
        if error is None:
            self._warn(work)
        return error

    def _gone(self, work: PendingWork) -> Exception | None:
        group = self._group
        left = group.checkin.departed()
        dead = [rank for rank in range(group.size()) if processes.has_ended(self._processes[rank])]
        if work.call.peer is None:
            # One that came and died before it was done will not move the rest of its data.
            arrivals = group.arrivals(work)
            missed = {rank for rank in dead if arrivals[rank] < 2}
            missed |= {rank for rank, last in left.items() if last < work.call.sequence}
        elif work.call.peer < 0:
            gone = {*left, *dead}
            missed = gone if len(gone) == group.size() - 1 else set()
        else:
            missed = {work.call.peer} & {*left, *dead}
        if not missed or self._may_end_the_job(missed - {*dead}):
            return None
        waiting = f"waiting for {describe_ranks(sorted(missed))}"
        if work.call.peer is None:
            group.break_off(f"{work} failed, {waiting}")
        text = f"{work} on rank {group.rank()}: {waiting}"
        killed = sorted(missed - {*left})
        if killed:
            who = f"{self._name(killed)} has {processes.ENDED}"
            return RankFailedError(f"{text}, but {who}", ranks=[group.global_rank(rank) for rank in killed])
        return DistBackendError(f"{text}, which left this group without taking part; look for what ended it")

    def _may_end_the_job(self, leaving: set[int]) -> bool:
        """Return whether to wait a little: a rank on its way out may have failed, and say so better."""
        self._leaving = {rank: self._leaving.get(rank, time.monotonic()) for rank in leaving}
        return any(time.monotonic() - noticed < LEAVING_GRACE for noticed in self._leaving.values())

    def _name(self, ranks: list[int]) -> str:
        names = []
        for rank in ranks:
            process = self._processes[rank]
            names.append(f"rank {rank}" + (f" (process {process.pid})" if process else ""))
        return " and ".join(names)

    def _warn(self, work: PendingWork) -> None:
        """The watchdog: one line after a while, the next after twice the time."""
        if self._watchdog <= 0 or work.elapsed() < self._watchdog or time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + work.elapsed()
        who = self._who_is_missing(work) if work.call.peer is None else self._what_they_do([work.call.peer])
        log.warning(
            "mpiplus: rank %d has waited %.0f s for %s, and goes on waiting (the timeout is %g s). %s",
            self._group.rank(),
            work.elapsed(),
            work,
            work.seconds,
            who,
        )

    # ---- when its time is up ----

    def timed_out(self, work: PendingWork) -> Exception:
        group = self._group
        text = (
            f"{work} timed out on rank {group.rank()} after {work.elapsed():.1f} s (the timeout is {work.seconds:g} s)"
        )
        if monitor.monitor is not None:
            group.checkin.briefly(monitor.monitor.want_traces, None)
        if (peer := work.call.peer) is not None:
            doing = attempt("what the other rank does", lambda: self._what_they_do([peer]), "")
            whose = f"rank {peer} {doing}" if doing else "that rank is stopped or dead"
            work.if_cancelled = DistBackendError(f"{text}: the matching call was not made there, or {whose}")
            group.take_back(work)  # a receive: the group stays usable
            return work.if_cancelled
        group.break_off(f"{work} timed out")
        group.checkin.report(_report_of(work.call))
        time.sleep(min(_REPORT_GRACE, 0.1 * work.seconds))
        who = attempt("who is missing", lambda: self._who_is_missing(work), "Who has not arrived is unknown")
        group.break_off(f"{work} timed out. {who}")  # whoever calls next may never have waited for this one
        return DistBackendError(f"{text}. {who}")

    def _who_is_missing(self, work: PendingWork) -> str:
        group = self._group
        everybody = range(group.size())
        heard = group.checkin.reports()
        reports = {**(heard or {}), group.rank(): _report_of(work.call)}
        arrivals = group.arrivals(work)
        waiting = {r for r in everybody if arrivals[r] > 0}
        waiting |= {r for r, report in reports.items() if report.number >= work.call.sequence}
        missing = [r for r in everybody if r not in waiting]
        # Those who have come are asked as well: one of them may have been stopped since.
        others = [r for r in everybody if r in waiting and r != group.rank()]
        answers = self._ask([*missing[:_ENOUGH], *others[:_ENOUGH_ARRIVED]])
        # A rank whose part is done, as a broadcast's root, or that has only just come, has not reported.
        calls = {r: answer.call for r, answer in answers.items() if answer is not None and answer.call is not None}
        through = {r: last for r, last in calls.items() if last.number >= work.call.sequence and r not in waiting}
        missing = [r for r in missing if r not in through]
        parts = []
        if missing and heard is None and min(arrivals) < 0:
            parts.append(
                "Who has not arrived is unknown: the store does not answer, so rank 0, which holds it, may be the one"
            )
        elif missing:
            parts.append(f"{NOT_ARRIVED}{describe_ranks(missing)} ({self._in_words(missing, answers)})")
        # With no answer at all it is the store that gives none, or the only one who could.
        silent = [r for r in others if r in answers and answers[r] is None] if heard is not None else []
        if well := sorted(waiting - {*silent}):
            parts.append(f"arrived: {describe_ranks(well)}")
        if silent:
            parts.append(f"arrived, and gave no answer since: {describe_ranks(silent)} ({_SILENT})")
        elif waiting and heard is None and not missing:
            parts.append("the store does not answer, so rank 0 of the world, which holds it, may be stopped or cut off")
        if through:
            ranks = sorted(through)
            parts.append(f"arrived by their own account: {describe_ranks(ranks)} ({self._in_words(ranks, answers)})")
        if different := self._different_calls({**reports, **through}):
            parts.append(f"and they call different operations: {different}")
        return "; ".join(parts)

    def _different_calls(self, reports: dict[int, Report]) -> str:
        """Return who calls what under the number of this rank's call; nothing where all agree."""
        mine = reports[self._group.rank()]
        callers: dict[str, list[int]] = {}
        for rank, report in sorted(reports.items()):
            if report.number == mine.number:
                callers.setdefault(report.essence, []).append(rank)
        if len(callers) < 2:
            return ""
        calls = [f"{reports[ranks[0]].call} on {describe_ranks(ranks)}" for ranks in callers.values()]
        more = [f"and {len(calls) - _ENOUGH} more"] if len(calls) > _ENOUGH else []
        return ", ".join([*calls[:_ENOUGH], *more])

    def _ask(self, ranks: list[int]) -> dict[int, _Answer | None]:
        """Return what they do; None of those that do not answer, which cannot."""
        asking = monitor.monitor
        asked = {self._group.global_rank(rank): rank for rank in ranks if rank >= 0}
        if asking is None or not asked:
            return {}
        nobody: dict[int, str] = {}
        answers = self._group.checkin.briefly(lambda: asking.ask(list(asked)), nobody, monitor.ANSWER_WITHIN + 0.5)
        return {rank: self._understood(answers.get(world)) for world, rank in asked.items()}

    def _understood(self, answer: str | None) -> _Answer | None:
        if answer is None:
            return None
        words, calls = answer.split("\n")[:2]
        call: Any = json.loads(calls).get(self._group.group_name)
        return _Answer(words, Report(*call) if call else None)

    def _in_words(self, ranks: list[int], answers: dict[int, _Answer | None]) -> str:
        """Return what ``_ask`` has heard of ``ranks``, and which of the others have left."""
        heard = {rank: answers[rank] for rank in ranks if rank in answers}
        silent = [rank for rank, answer in heard.items() if answer is None]
        left = self._group.checkin.departed() if silent else {}
        parts = [f"rank {rank} {answer.words}" for rank, answer in heard.items() if answer is not None]
        parts += [f"rank {rank} left this group; look for what ended it" for rank in silent if rank in left]
        if unknown := [rank for rank in silent if rank not in left]:
            parts.append(f"{describe_ranks(unknown)} gave no answer: {_SILENT}")
        text = "; ".join(parts)
        return text.removeprefix(f"rank {ranks[0]} ") if len(ranks) == 1 else text

    def _what_they_do(self, ranks: list[int]) -> str:
        return self._in_words(ranks, self._ask(ranks))
