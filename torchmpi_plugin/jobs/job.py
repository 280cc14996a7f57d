"""Run a job, from its description to the report on its end; and again: how often, after which ends, on which nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ..launchers.mpirun import Launcher, find_launcher, launch_command, launch_environment
from ..names import counted
from .job_monitor import JobMonitor
from .loop import run
from .outcome import ANY, Ending, JobResult, RankRecord, result_of
from .output import Terminal, Writer, destination
from .signals import ENDING, caught
from .spec import JobSpec

#: A shell's codes for a program that cannot be run: another attempt will not find it either.
_CANNOT_RUN = (126, 127)
#: An attempt that was over earlier has hardly worked. The next ones wait, longer each time.
FAST_SECONDS, FIRST_PAUSE, LONGEST_PAUSE = 60.0, 1.0, 60.0


def run_job(spec: JobSpec) -> JobResult:
    """Run a program on several ranks through the MPI's own launcher, and watch it to its end.

    What the ranks print goes to ``out`` and ``err``. Nothing else is printed there, but for what mpirun says of its
    own accord where no rank is to blame, and what ``verbose`` adds. In the main thread, SIGTERM, SIGINT, SIGHUP,
    SIGUSR1 and SIGUSR2 are passed on to the ranks while the job runs.

    Raises:
        ValueError: a description that cannot work; nothing was started.
        LauncherError: no launcher that fits; nothing was started.
    """
    layout = spec.layout
    launcher = spec.launcher if isinstance(spec.launcher, Launcher) else find_launcher(spec.launcher)
    argv = launch_command(launcher, layout, spec.map_by, spec.mpi_args)
    if spec.verbose:
        how = f"mpiplus run: {launcher.version} ({launcher.path})\n    {shlex.join(argv)}"
        print(how, file=spec.err or sys.stderr)
    monitor = JobMonitor(spec, _terminals(spec))
    run(monitor.run(argv, launch_environment(launcher, layout, spec.environment())))
    return result_of(monitor.ending, Path(launcher.path).name, spec.verbose)


def _terminals(spec: JobSpec) -> list[Terminal]:
    """For stdout and stderr."""
    writers: dict[object, Writer] = {}
    terminals = []
    for stream in (spec.out or sys.stdout, spec.err or sys.stderr):
        writer = writers.setdefault(destination(stream), Writer())
        colour = _is_coloured(stream) if spec.colour is None else spec.colour
        terminals.append(Terminal(stream, spec.prefix, colour, writer, spec.attempt))
    return terminals


def _is_coloured(stream: TextIO) -> bool:
    with contextlib.suppress(ValueError, AttributeError):
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return False


# ---- again ----


def kind_of(result: JobResult) -> str:
    """Return the kind of an attempt's end, of KINDS; empty where another one would make no difference."""
    ending = result.ending
    if not result.returncode or ending is None or ending.signalled:
        return ""
    if ending.trouble:
        return "lost" if ending.missing else ""
    if ending.is_timeout:
        return "timeout"
    if result.failure is None:
        return "exit"
    record = ending.records[result.failure.rank]
    if record.gone_without_a_word:
        return "lost"
    return "signal" if record.signal else "exit"


def is_worth_another(kind: str, code: int, on: Collection[str]) -> bool:
    """Return whether the user wants another attempt after such an end."""
    if str(code) in on:
        return bool(kind)
    return kind in on or (ANY in on and bool(kind) and not (kind == "exit" and code in _CANNOT_RUN))


class NotEnoughError(Exception):
    """Fewer nodes are left than the job needs."""


class SpareNodes:
    """Chooses nodes for each attempt, of those that have not been lost."""

    def __init__(self, names: Sequence[str], ranks: int, least: int, most: int, answers: Callable[[str], bool]) -> None:
        self._names, self._ranks, self._least, self._most = list(names), ranks, least, most
        self._answers = answers
        self._chosen: list[str] = []

    def choose(self) -> dict[str, Any]:
        """The nodes of the next attempt, in the words of its description; a NotEnoughError: there are too few."""
        if len(self._names) < self._least:
            left = ", ".join(self._names) or "none"
            raise NotEnoughError(
                f"the job needs {counted(self._least, 'node')} (--nnodes), and there are {len(self._names)}: {left}"
            )
        self._chosen = self._names[: self._most]
        hosts = ",".join(f"{name}:{self._ranks}" for name in self._chosen)
        return {"hosts": hosts, "hostfile": None, "nnodes": len(self._chosen)}

    def leave_out_lost(self, ending: Ending) -> list[str]:
        """Those of the last attempt on which no rank could be reached, and which still do not answer."""
        known = [it for it in ending.records if it.node and not it.gone_without_a_word]
        reached = {self._node_of(record) for record in known if record.is_killed or not record.silent}
        lost = [name for name in self._chosen if name not in reached and not self._answers(name)]
        self._names = [name for name in self._names if name not in lost]
        return lost

    def _node_of(self, record: RankRecord) -> str:
        """By the name that it gave, else by its place: the user may have named nodes in another way, or by address."""
        for name in self._chosen:
            if record.node and name.partition(".")[0] == record.node.partition(".")[0]:
                return name
        return self._chosen[min(record.rank // self._ranks, len(self._chosen) - 1)]


@dataclass
class Attempts:
    """A job that is started, and again where that is wanted.

    Attributes:
        spec: how often it may be started again, and the time limit, of all attempts together, among others.
        nodes: those to choose from; None: the spec's.
        tell: prints what happens.
        on: after which ends: of KINDS, or exit codes, or ANY.
        attempt_timeout: seconds for each attempt.
    """

    spec: JobSpec
    nodes: SpareNodes | None
    tell: Callable[[str], None]
    on: Collection[str] = (ANY,)
    attempt_timeout: float | None = None
    start: Callable[[JobSpec], JobResult] = run_job

    def __post_init__(self) -> None:
        self._number = self._fast = 0
        self._until = None if self.spec.timeout is None else time.monotonic() + self.spec.timeout

    def run(self) -> JobResult:
        """Run the job to its end; how its last attempt ended."""
        try:
            return self._run()
        except KeyboardInterrupt:  # between two attempts, when nothing runs
            return JobResult(128 + signal.SIGINT, None, "mpiplus run: SIGINT came between two attempts")

    def _run(self) -> JobResult:
        while True:
            began = time.monotonic()
            try:
                result = self._attempt()
            except NotEnoughError as error:
                return JobResult(1, None, f"mpiplus run: {error}")
            kind, ending = kind_of(result), result.ending
            if result.returncode and ending and not ending.signalled and self._left() != 0:
                kind = self._without_lost_nodes(kind, ending)
            if self._left() == 0 or not is_worth_another(kind, result.returncode, self.on):
                return result
            if self._number == self.spec.max_restarts:
                last = f"\nmpiplus run: restart {self._number} was the last" if self._number else ""
                return result._replace(message=result.message + last)
            self._fast = self._fast + 1 if time.monotonic() - began < FAST_SECONDS else 0
            if (ended := self._wait(result)) is not None:
                return ended

    def _attempt(self) -> JobResult:
        limits = [limit for limit in (self._left(), self.attempt_timeout) if limit is not None]
        changes: dict[str, Any] = {"timeout": min(limits, default=None), "attempt": self._number}
        if self.nodes:
            changes |= self.nodes.choose()
        return self.start(replace(self.spec, **changes))

    def _left(self) -> float | None:
        """Of the time of all attempts; None: there is no limit."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def _without_lost_nodes(self, kind: str, ending: Ending) -> str:
        """Leave out the nodes that no longer answer; the kind of the end with that known."""
        lost = self.nodes.leave_out_lost(ending) if self.nodes else []
        if lost:
            self.tell(
                f"mpiplus run: {', '.join(lost)} no longer answer{'s' if len(lost) == 1 else ''} and will be left out"
            )
        return "lost" if lost else kind

    def _wait(self, result: JobResult) -> JobResult | None:
        """Say what has happened and what comes, and wait for it; how the job ended where a signal comes instead."""
        seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._fast - 1)) if self._fast else 0.0
        self._number += 1
        when = f"in {seconds:g} s" if seconds else "now"
        text = f"{result.message}\nmpiplus run: restart {self._number} of at most {self.spec.max_restarts} {when}"
        left = self._left()
        if number := pause(seconds if left is None else min(seconds, left), lambda: self.tell(text)):
            name = signal.Signals(number).name
            return JobResult(128 + number, None, f"mpiplus run: {name} came between two attempts")
        if self._left() == 0:
            return result._replace(
                returncode=124, message="mpiplus run: the time limit has passed between two attempts"
            )
        return None


def pause(seconds: float, announce: Callable[[], None]) -> int:
    """Announce a restart and wait, unless a signal comes that ends jobs; its number, else 0.

    Who reads the announcement may send one at once, whose default would end this process without a word. Other signals
    have nobody to go to.
    """

    async def wait() -> int:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int] = loop.create_future()

        def hear(number: int) -> None:
            if number in ENDING and not came.done():
                came.set_result(number)

        with caught(loop, hear):
            announce()
            done, _ = await asyncio.wait([came], timeout=seconds)
        return came.result() if done else 0

    return run(wait())
