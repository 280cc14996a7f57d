"""The end of a job: what is known of each rank then, which failed first, and the words for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..names import NOT_ARRIVED, counted, describe_ranks
from .stderr import TRACEBACK, StderrTail, last_error

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


# ---- the words for it ----

#: So many ranks are named.
_SHOWN = 16

_TIMED_OUT = 124  # as timeout(1) has it
_LEFT = 70  # EX_SOFTWARE: a rank left with 0; mpirun's own code would be 1 or 9, like any failure's
_KILLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGINT, 128 + signal.SIGHUP)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_ending(record: RankRecord) -> str:
    if record.signal:
        hint = " (by somebody, or the kernel where memory ran out)" if record.signal == signal.SIGKILL else ""
        return f"killed by {signal_name(record.signal)}{hint}"
    if record.code is not None:
        return f"exit code {record.code}"
    return "lost without a word: its supervisor was killed, or its node or the network is down"


def find_first(order: Sequence[RankRecord], records: Sequence[RankRecord]) -> RankRecord | None:
    """The rank that failed first; None if nobody did, or nobody can tell."""
    by_themselves = [
        record
        for record in order
        if record.left_by_itself or (record.code and not record.ended_by_us and not record.ended_by_mpi)
    ]
    if by_themselves:
        return by_themselves[0]
    # MPI_Abort: mpirun kills everybody, and which rank asked for it shows in its last words only.
    complained = [record for record in records if record.complained and record.code != 0 and not record.ended_by_us]
    if complained:
        return min(complained, key=lambda record: record.complained)
    lost = [record for record in records if record.gone_without_a_word and not record.ended_by_us]
    return lost[0] if lost and len(lost) < max(2, len(records)) else None


def failure_of(record: RankRecord, launcher_code: int) -> RankFailure:
    code = record.left_with or record.code or 1
    if record.ended_by_mpi and launcher_code and not record.left_with:
        code = launcher_code
    cause = describe_ending(record)
    if record.left_with:
        cause = f"exit code {record.left_with}"
    elif record.ended_by_mpi:
        cause = "ended the job (MPI_Abort)"
    return RankFailure(record.rank, record.node, code, record.stderr_tail.text(), cause, record.error)


def describe_failure(failure: RankFailure, records: Sequence[RankRecord]) -> str:
    """The launcher's last words on a failed job. The last line says who, what and where; a traceback stands above."""
    name = f"rank {failure.rank} on node {failure.node}"
    lines = []
    if failure.traceback and (records[failure.rank].hidden or TRACEBACK not in failure.traceback):
        lines += [f"mpiplus run: the last lines of {name} on stderr:"]
        lines += [f"    {line}" for line in failure.traceback.splitlines()]
    if failure.error:
        lines += [f"mpiplus run: {name} has recorded: {failure.error}"]
    error, place = last_error(failure.traceback)
    late, _, rest = error.partition(NOT_ARRIVED)[2].partition("; arrived")
    if late:
        late = late if rest else late.partition(" (")[0]  # a long error is cut, maybe within what they do
        ended = _others_ended(records, [failure.rank])
        lines.append(f"mpiplus run: {late} did not come; {name} gave up waiting first: {failure.cause}{ended}")
        return "\n".join(lines)
    alike = [it.rank for it in records if error and _without_numbers(it) == _without_numbers(records[failure.rank])]
    ended = _others_ended(records, [failure.rank, *alike])
    same = f"; the same on {describe_ranks(alike)}" if len(alike) > 1 else ""
    what = f" ({', '.join(filter(None, (error, place)))})" if error else ""
    lines.append(f"mpiplus run: {name} failed first: {failure.cause}{what}{same}{ended}")
    return "\n".join(lines)


def _others_ended(records: Sequence[RankRecord], told: Sequence[int]) -> str:
    """Say how many ranks were ended, but for those of which something is ``told``."""
    ended = [it for it in records if (it.ended_by_us or it.ended_by_mpi) and not it.silent and it.rank not in told]
    return f"; {counted(len(ended), 'other rank')} {'was' if len(ended) == 1 else 'were'} ended" if ended else ""


def _without_numbers(record: RankRecord) -> str:
    """Its last error as it may stand on other ranks too, with other sizes and times."""
    return re.sub(r"\d+", "", " ".join(last_error(record.stderr_tail.text())))


def result_of(ending: Ending, launcher: str, verbose: bool = False) -> JobResult:
    result = _result(ending, launcher, verbose)
    words = [result.message, *_left_behind(ending)]
    return result._replace(message="\n".join(word for word in words if word), ending=ending)


def _left_behind(ending: Ending) -> Iterator[str]:
    """Describe what the job has left: ranks that may still run, output that nobody has read."""
    by_node: dict[tuple[str, bool], list[int]] = {}
    for record in ending.records:
        if record.silent:
            by_node.setdefault((record.node, record.is_killed), []).append(record.rank)
    for (node, is_killed), ranks in by_node.items():
        what = (
            "(stopped?), and was killed"
            if is_killed
            else "(the node cannot be reached, or the process was stopped); what still runs there must be ended by hand"
        )
        yield f"mpiplus run: {describe_ranks(ranks)} on node {node} did not answer the order to end {what}"
    if ending.unread:
        yield f"mpiplus run: the last {ending.unread} characters of output are lost: their reader did not take them"


def _result(ending: Ending, launcher: str, verbose: bool) -> JobResult:
    said = f"{launcher} says:\n{ending.noise.strip()}\n" if ending.noise.strip() else ""
    code = ending.launcher_code or 0
    quoted = said if verbose else ""
    if ending.trouble:
        code = 128 + ending.signalled if ending.signalled else code
        return JobResult(code or 1, None, said + _not_started(ending, launcher, code))
    if ending.is_timeout:
        late = f"; {describe_ranks(ending.timed_out)} had not ended" if ending.timed_out else ""
        return JobResult(_TIMED_OUT, None, f"{quoted}mpiplus run: the time limit has passed{late}; the job was ended")
    if ending.recovers and not ending.signalled and (recovery := _describe_recovery(ending.records)):
        return JobResult(0, None, quoted + recovery)
    first_failed = find_first(ending.order, ending.records)
    if first_failed is not None:
        failure = failure_of(first_failed, code)
        return JobResult(failure.exit_code, failure, quoted + describe_failure(failure, ending.records))
    if ending.signalled:
        name = signal_name(ending.signalled)
        unheard = 128 + signal.SIGKILL if any(record.silent for record in ending.records) else 0
        first = next((record.code for record in ending.order if record.code), unheard)
        if first and ending.signalled == signal.SIGINT:
            first = 128 + signal.SIGINT  # as the shell has it, whatever each rank made of it
        return JobResult(first, None, f"{quoted}mpiplus run: {name} was passed on to the ranks")
    return _result_of_mpirun(ending, launcher, said, quoted)


def _result_of_mpirun(ending: Ending, launcher: str, said: str, quoted: str) -> JobResult:
    """Describe an end where no rank is known to have failed."""
    code = ending.launcher_code or 0
    left = [record for record in ending.order if record.code == 0]
    was_killed = ending.launcher_code in _KILLED  # mpirun itself, by somebody else
    if left and any(record.ended_by_mpi for record in ending.records) and not was_killed:
        return _result_of_leaving(left, len(ending.records), said)
    if code or any(record.code != 0 for record in ending.records):
        ended = f"mpiplus run: {launcher} ended the job with exit code {code}, and no rank had failed before"
        return JobResult(code or 1, None, said + ended)
    return JobResult(0, None, quoted.rstrip())


def _not_started(ending: Ending, launcher: str, code: int) -> str:
    missing = f"; {describe_ranks(ending.missing)} did not" if ending.missing else ""
    if ending.signalled:
        return f"mpiplus run: {signal_name(ending.signalled)} came before the ranks had started"
    return (
        f"mpiplus run: the job did not start: {ending.trouble}{missing} ({launcher}: exit code {code}). "
        f"To see the command line: mpiplus run -v; what MPI is here: mpiplus info"
    )


def _result_of_leaving(left: Sequence[RankRecord], ranks: int, said: str) -> JobResult:
    failure, first = None, left[0]
    if len(left) == 1:  # it is to blame
        cause = "ended with exit code 0, but without MPI_Finalize"
        failure = RankFailure(first.rank, first.node, _LEFT, first.stderr_tail.text(), cause)
    names = ", ".join(f"rank {record.rank} on node {record.node}" for record in left[:_SHOWN])
    others = ranks - len(left)
    message = (
        f"mpiplus run: {names} ended with exit code 0, {'one of them' if len(left) > 1 else 'but'} without "
        f"MPI_Finalize (os._exit?), while {counted(others, 'rank')} went on, which MPI has ended"
    )
    return JobResult(_LEFT, failure, said + message)


def _describe_recovery(records: Sequence[RankRecord]) -> str:
    """Name those that have died, not by mpirun's hand, where all others have ended well; empty: it was not so."""
    dead = [record for record in records if record.code != 0]
    if len(dead) == len(records) or any(it.ended_by_mpi or not (it.signal or it.gone_without_a_word) for it in dead):
        return ""
    lines = [f"rank {record.rank} on node {record.node} was {describe_ending(record)}" for record in dead]
    return "\n".join(f"mpiplus run: {line}; the others went on, and ended well" for line in lines)
