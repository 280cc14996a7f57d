"""What is known of a job that has ended, and what run_job returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TAIL_LINES = 40
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first.

    Attributes:
        rank: its number in MPI_COMM_WORLD.
        host: where it ran.
        exit_code: as the shell has it: 1 to 255, or 128 + the number of the signal that killed it.
        traceback: the last lines it wrote to stderr, from its traceback on if they have one.
        cause: in words: how it ended.
    """

    rank: int
    host: str
    exit_code: int
    traceback: str
    cause: str = ""


class JobResult(NamedTuple):
    """How a job ended.

    Attributes:
        returncode: 0; the code of the rank that failed first; 124 past the time limit; mpirun's own.
        failure: the rank that failed first, if that is known and what ended the job.
        message: what to tell the user: lines for stderr, none after a success.
    """

    returncode: int
    failure: RankFailure | None
    message: str = ""


@dataclass
class RankRecord:
    """What the launcher knows about one rank.

    Attributes:
        code: how its program ended, as the shell has it; None while it runs, or where that was never told.
        signal: what killed the program; 0: nothing.
        ended_by_us: its program was still running when this launcher began to end the job.
        ended_by_mpi: its program was still running when mpirun began to end this rank.
        gone: the connection is closed.
        complained: when its stderr first showed an uncaught exception or an abort; 0: never.
    """

    rank: int
    host: str = ""
    code: int | None = None
    signal: int = 0
    ended_by_us: bool = False
    ended_by_mpi: bool = False
    gone: bool = False
    complained: float = 0.0
    tail: list[str] = field(default_factory=list)

    def heard(self, lines: Sequence[str], now: float) -> None:
        """Remember what it wrote to stderr."""
        if not self.complained and any(_is_complaint(line) for line in lines):
            self.complained = now
        self.tail = [*self.tail, *lines][-TAIL_LINES:]

    def last_words(self) -> str:
        """Its last lines on stderr, from the last traceback on if there is one."""
        starts = [index for index, line in enumerate(self.tail) if _TRACEBACK in line]
        start = starts[-1] if starts else 0
        while start and self.tail[start - 1].startswith(("During handling of", "The above exception", "\n")):
            start -= 1
        return "".join(self.tail[start:])


def _is_complaint(line: str) -> bool:
    return _TRACEBACK in line or "ends the job" in line or "MPI_Abort" in line


@dataclass
class Ending:
    """What the launcher knows when everything has ended.

    Attributes:
        records: of all ranks.
        order: the ranks whose programs have ended, the first first.
        launcher_code: how mpirun ended, as the shell has it.
        noise: what mpirun itself has said.
        signalled: the signal with which somebody ended this launcher, passed on to the ranks; 0: none.
        is_timeout: the time limit has passed.
        timed_out: the ranks that were running then.
        trouble: why the ranks did not start; empty: they did.
        missing: the ranks that did not come up.
    """

    records: list[RankRecord]
    order: list[RankRecord] = field(default_factory=list)
    launcher_code: int | None = None
    noise: str = ""
    signalled: int = 0
    is_timeout: bool = False
    timed_out: list[int] = field(default_factory=list)
    trouble: str = ""
    missing: list[int] = field(default_factory=list)
