"""The result of a job that has ended, as run_job returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .stderr import TRACEBACK, StderrTail

#: How an attempt may end that is worth another one; and as users say all of these.
KINDS, ANY = ("signal", "exit", "lost", "timeout"), "any"
_COMPLAINTS = (TRACEBACK, "ends the job", "MPI_Abort")


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first."""

    rank: int  # its number in MPI_COMM_WORLD
    node: str  # where it ran
    exit_code: int  # as the shell has it: 1 to 255, or 128 + the number of the signal that killed it
    traceback: str  # the last lines it wrote to stderr, from its traceback on if they have one
    cause: str = ""  # in words: how it ended
    error: str = ""  # what torch's @record has written of its last exception; empty: nothing


@dataclass
class RankRecord:
    """The launcher's knowledge of one rank."""

    rank: int
    node: str = ""
    #: how its program ended, as the shell has it; None while it runs, or where that was never told
    code: int | None = None
    signal: int = 0  # what killed the program; 0: nothing
    ended_by_us: bool = False  # its program was still running when this launcher began to end the job
    ended_by_mpi: bool = False  # its program was still running when mpirun began to end this rank
    leaves: bool = False  # its program has said that it is leaving, before others could notice
    left_with: int = 0  # the exit code that it named then; 0: it did not know it yet
    gone: bool = False  # the connection is closed
    silent: bool = False  # its supervisor did not say that it has followed the order to end
    is_killed: bool = False  # that supervisor and its program were on this node, and were killed
    error: str = ""  # what its program has written into its error file
    hidden: bool = False  # what it prints is not shown
    complained: float = 0.0  # when its stderr first showed an uncaught exception or an abort; 0: never
    stderr_tail: StderrTail = field(default_factory=StderrTail)

    @property
    def gone_without_a_word(self) -> bool:
        """Lost: nobody knows how its program ended."""
        return self.gone and self.code is None

    @property
    def left_by_itself(self) -> bool:
        """It said that it was leaving, and did so with an error."""
        return self.leaves and self.code != 0 and (bool(self.left_with) or bool(self.code and not self.signal))

    def heard(self, lines: Sequence[str], now: float) -> None:
        if not self.complained and any(word in line for line in lines for word in _COMPLAINTS):
            self.complained = now
        for line in lines:
            self.stderr_tail.add(line)


@dataclass
class Ending:
    """The launcher's knowledge when everything has ended."""

    records: list[RankRecord]  # of all ranks
    #: the ranks whose programs have ended, or have said that they are about to, the first first
    order: list[RankRecord] = field(default_factory=list)
    launcher_code: int | None = None  # how mpirun ended, as the shell has it
    noise: str = ""  # what mpirun itself has said
    signalled: int = 0  # the signal with which somebody ended this launcher, passed on to the ranks; 0: none
    is_timeout: bool = False  # the time limit has passed
    timed_out: list[int] = field(default_factory=list)  # the ranks that were running then
    trouble: str = ""  # why the ranks did not start; empty: they did
    missing: list[int] = field(default_factory=list)  # the ranks that did not come up
    unread: int = 0  # characters of output that the reader of stdout or stderr has not taken
    recovers: bool = False  # MPI was asked to let the others go on after the death of a rank


class JobResult(NamedTuple):
    """The end of a job, for users."""

    #: 0; the code of the rank that failed first; 124 past the time limit; 70 where a rank left with 0 and mpirun ended
    #: the others for it; mpirun's own.
    returncode: int
    failure: RankFailure | None  # of the rank that failed first, if that is known and what ended the job
    message: str = ""  # lines for stderr, none after a success
    ending: Ending | None = None  # all that is known; None: nothing was started
