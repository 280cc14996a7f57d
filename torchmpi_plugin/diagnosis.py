"""Why an operation takes so long: who has come, who has gone, and what the others are doing."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from . import processes, status
from .errors import DistBackendError, RankFailedError, describe_ranks

if TYPE_CHECKING:
    from .group import Group
    from .work import PendingWork

log = logging.getLogger("torchmpi_plugin")

#: A wait is reported to the other ranks after this share of its time, and at the latest after so many seconds.
_REPORT_SHARE, _REPORT_AFTER = 0.25, 2.0
#: At a deadline, the others' reports are given this long to come in.
_REPORT_GRACE = 0.5
#: Seconds between two looks at who has gone.
_LOOK_EVERY = 1.0


def _watchdog_seconds() -> float:
    """After how long a wait is worth a line on stderr; 0: never."""
    try:
        return float(os.environ.get("MPIPLUS_WATCHDOG", "60"))
    except ValueError:
        return 60.0


class Diagnosis:
    """Of one group. Everything here runs under ``lock``, on the thread that waits or on the background one."""

    def __init__(self, group: Group) -> None:
        self.lock = threading.Lock()
        # Not a cycle: a destroyed group must go at once, and with it the store it hosts, whose port may be wanted.
        self._group: Group = weakref.proxy(group)
        self._looked = 0.0
        self._reported = -1
        self._watchdog = _watchdog_seconds()
        self._quiet_until = 0.0

    # ---- while an operation waits ----

    def look(self, call: PendingWork) -> Exception | None:
        """Let the others know that ``call`` waits; the error, if it waits for somebody who has gone."""
        group = self._group
        if call.elapsed() < min(_REPORT_AFTER, _REPORT_SHARE * call.seconds):
            return None
        if call.peer is None and call.number > self._reported:
            self._reported = call.number
            group.checkin.report(call.number, call.name)
        if time.monotonic() - self._looked < _LOOK_EVERY:
            return None
        self._looked = time.monotonic()
        error = self._gone(call)
        if error is None:
            self._bark(call)
        return error

    def _gone(self, call: PendingWork) -> Exception | None:
        group = self._group
        left = group.checkin.departed()
        dead = [rank for rank in range(group.size()) if processes.has_ended(group.communicator.processes[rank])]
        if call.peer is None:
            missed = {rank for rank in dead if not group.has_arrived(call, rank)}
            missed |= {rank for rank, last in left.items() if last < call.number}
        elif call.peer < 0:
            gone = {*left, *dead}
            missed = gone if len(gone) == group.size() - 1 else set()
        else:
            missed = {call.peer} & {*left, *dead}
        if not missed:
            return None
        if call.peer is None:
            group.break_off(f"{call} failed")
        text = f"{call} on rank {group.rank()}: waiting for {describe_ranks(sorted(missed))}"
        killed = sorted(missed - {*left})
        if killed:
            how = f"but {self._name(killed)} has ended without a word: killed, out of memory, or os._exit()"
            return RankFailedError(f"{text}, {how}", ranks=[group.global_rank(rank) for rank in killed])
        return DistBackendError(f"{text}, which left this group without taking part; look for what ended it")

    def _name(self, ranks: list[int]) -> str:
        names = []
        for rank in ranks:
            process = self._group.communicator.processes[rank]
            names.append(f"rank {rank}" + (f" (process {process.pid})" if process else ""))
        return " and ".join(names)

    def _bark(self, call: PendingWork) -> None:
        """The watchdog: one line after a while, the next after twice the time."""
        if self._watchdog <= 0 or call.elapsed() < self._watchdog or time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + call.elapsed()
        who = self._who_is_missing(call) if call.peer is None else self._what_they_do([call.peer])
        log.warning(
            "mpiplus: rank %d has waited %.0f s for %s, and goes on waiting (the timeout is %g s). %s",
            self._group.rank(),
            call.elapsed(),
            call,
            call.seconds,
            who,
        )

    # ---- when its time is up ----

    def timed_out(self, call: PendingWork) -> Exception:
        """The error of an operation whose time is up."""
        group = self._group
        text = (
            f"{call} timed out on rank {group.rank()} after {call.elapsed():.1f} s (the timeout is {call.seconds:g} s)"
        )
        if call.peer is not None:
            doing = self._what_they_do([call.peer])
            whose = f"rank {call.peer} {doing}" if doing else "that rank is stopped or dead"
            call.if_cancelled = DistBackendError(f"{text}: the matching call was not made there, or {whose}")
            group.take_back(call)  # a receive: the group stays usable
            return call.if_cancelled
        group.break_off(f"{call} timed out")
        group.checkin.report(call.number, call.name)
        time.sleep(min(_REPORT_GRACE, 0.1 * call.seconds))
        return DistBackendError(f"{text}. {self._who_is_missing(call)}")

    def _who_is_missing(self, call: PendingWork) -> str:
        group = self._group
        everybody = range(group.size())
        answer = group.checkin.reports()
        reports = {**(answer or {}), group.rank(): (call.number, call.name)}
        waiting = {r for r in everybody if group.has_arrived(call, r)}
        waiting |= {r for r, (sequence, _) in reports.items() if sequence >= call.number}
        missing = [r for r in everybody if r not in waiting]
        others = sorted(
            {f"{name} on rank {r}" for r, (s, name) in reports.items() if s == call.number and name != call.name}
        )
        parts = []
        if missing and answer is None and not group.can_see_arrivals(call):
            parts.append(
                "Who has not arrived is unknown: the store does not answer, so rank 0, its host, may be the one"
            )
        elif missing:
            parts.append(f"Not arrived: {describe_ranks(missing)} ({self._what_they_do(missing)})")
        if waiting:
            parts.append(f"arrived: {describe_ranks(sorted(waiting))}")
        if others:
            parts.append(f"and they call different operations: {', '.join(others)}")
        return "; ".join(parts)

    def _what_they_do(self, ranks: list[int], limit: int = 8) -> str:
        """Their own words, of the first few; who does not answer cannot."""
        monitor = status.monitor
        asked = [rank for rank in ranks[:limit] if rank >= 0]
        if monitor is None or not asked:
            return ""
        worlds = {rank: self._group.global_rank(rank) for rank in asked}
        nobody: dict[int, str] = {}
        answers = self._group.checkin.briefly(
            lambda: monitor.ask(list(worlds.values())), nobody, status.ANSWER_WITHIN + 0.5
        )
        silent = [rank for rank in asked if worlds[rank] not in answers]
        parts = [f"rank {rank} {answers[worlds[rank]]}" for rank in asked if rank not in silent]
        if silent:
            parts.append(f"{describe_ranks(silent)} gave no answer: stopped, dead, cut off, or busy without Python")
        text = "; ".join(parts)
        return text.removeprefix(f"rank {ranks[0]} ") if len(ranks) == 1 else text
