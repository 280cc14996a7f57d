"""The end of a job: which rank failed first, and the words for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from ..names import NOT_ARRIVED, describe_ranks
from .outcome import Ending, JobResult, RankFailure, RankRecord
from .stderr import TRACEBACK, last_error

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


def describe_failure(failure: RankFailure, others: int, records: Sequence[RankRecord]) -> str:
    """The launcher's last words on a failed job. The last line says who, what and where; a traceback stands above."""
    name = f"rank {failure.rank} on node {failure.node}"
    lines = []
    if failure.traceback and (records[failure.rank].hidden or TRACEBACK not in failure.traceback):
        lines += [f"mpiplus run: the last lines of {name} on stderr:"]
        lines += [f"    {line}" for line in failure.traceback.splitlines()]
    if failure.error:
        lines += [f"mpiplus run: {name} has recorded: {failure.error}"]
    ended = f"; the other {others} rank{'s were' if others > 1 else ' was'} ended" if others else ""
    error, place = last_error(failure.traceback)
    late = error.partition(NOT_ARRIVED)[2].partition("; arrived")[0]
    if late:
        lines.append(f"mpiplus run: {late} did not come; {name} gave up waiting first: {failure.cause}{ended}")
        return "\n".join(lines)
    alike = [it.rank for it in records if error and _without_numbers(it) == _without_numbers(records[failure.rank])]
    same = f"; the same on {describe_ranks(alike)}" if len(alike) > 1 else ""
    what = f" ({', '.join(filter(None, (error, place)))})" if error else ""
    lines.append(f"mpiplus run: {name} failed first: {failure.cause}{what}{same}{ended}")
    return "\n".join(lines)


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
        ended = [record for record in ending.records if record.ended_by_us or record.ended_by_mpi]
        others = sum(not record.silent for record in ended) - first_failed.ended_by_mpi
        return JobResult(failure.exit_code, failure, quoted + describe_failure(failure, others, ending.records))
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
        f"MPI_Finalize (os._exit?), while {others} rank{'s' if others > 1 else ''} went on, which MPI has ended"
    )
    return JobResult(_LEFT, failure, said + message)


def _describe_recovery(records: Sequence[RankRecord]) -> str:
    """Name those that have died, not by mpirun's hand, where all others have ended well; empty: it was not so."""
    dead = [record for record in records if record.code != 0]
    if len(dead) == len(records) or any(it.ended_by_mpi or not (it.signal or it.gone_without_a_word) for it in dead):
        return ""
    lines = [f"rank {record.rank} on node {record.node} was {describe_ending(record)}" for record in dead]
    return "\n".join(f"mpiplus run: {line}; the others went on, and ended well" for line in lines)
