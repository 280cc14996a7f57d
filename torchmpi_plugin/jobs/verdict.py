"""The verdict on a job: which rank is to blame, and the words for it."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from .outcome import Ending, JobResult, RankFailure, RankRecord

_TIMED_OUT = 124  # as timeout(1) has it
_SHOWN_RANKS = 16


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_ending(record: RankRecord) -> str:
    """How a rank ended, in words."""
    if record.signal:
        hint = " (by somebody, or the kernel where memory ran out)" if record.signal == signal.SIGKILL else ""
        return f"killed by {signal_name(record.signal)}{hint}"
    if record.code is not None:
        return f"exit code {record.code}"
    return "lost without a word: its supervisor was killed, or its host or the network is down"


def find_culprit(order: Sequence[RankRecord], records: Sequence[RankRecord]) -> RankRecord | None:
    """The rank that failed first; None if nobody did, or nobody can tell.

    Args:
        order: the ranks whose programs have ended, in the order of their endings.
        records: all ranks.
    """
    by_themselves = [record for record in order if record.code and not record.ended_by_us and not record.ended_by_mpi]
    if by_themselves:
        return by_themselves[0]
    # MPI_Abort: mpirun kills everybody, and which rank asked for it shows in its last words only.
    complained = [record for record in records if record.complained and record.code != 0 and not record.ended_by_us]
    if complained:
        return min(complained, key=lambda record: record.complained)
    lost = [record for record in records if record.gone and record.code is None and not record.ended_by_us]
    return lost[0] if lost and len(lost) < max(2, len(records)) else None


def failure_of(record: RankRecord, launcher_code: int) -> RankFailure:
    """What is told about the rank that failed first."""
    code = record.code or 1
    if record.ended_by_mpi and launcher_code:
        code = launcher_code
    cause = "ended the job (MPI_Abort)" if record.ended_by_mpi else describe_ending(record)
    return RankFailure(record.rank, record.host, code, record.last_words(), cause)


def describe_failure(failure: RankFailure, others: int) -> str:
    """The launcher's last words on a failed job, the traceback first and the verdict last."""
    name = f"rank {failure.rank} on host {failure.host}"
    lines = []
    if failure.traceback:
        lines += [f"mpiplus run: the last lines of {name} on stderr:"]
        lines += [f"    {line}" for line in failure.traceback.splitlines()]
    ended = f"; the other {others} rank{'s were' if others > 1 else ' was'} ended" if others else ""
    lines.append(f"mpiplus run: {name} failed first: {failure.cause}{ended}")
    return "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2, 5``, cut after some."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def judge(ending: Ending, launcher: str, verbose: bool = False) -> JobResult:
    """Say how a job ended.

    Args:
        ending: what is known.
        launcher: the name of mpirun.
        verbose: quote mpirun in any case.
    """
    said = f"{launcher} says:\n{ending.noise.strip()}\n" if ending.noise.strip() else ""
    code = ending.launcher_code or 0
    quoted = said if verbose else ""
    if ending.trouble:
        return JobResult(code or 1, None, said + _not_started(ending, launcher, code))
    if ending.is_timeout:
        late = f"; {name_ranks(ending.timed_out)} had not ended" if ending.timed_out else ""
        return JobResult(_TIMED_OUT, None, f"{quoted}mpiplus run: the time limit has passed{late}; the job was ended")
    culprit = find_culprit(ending.order, ending.records)
    if culprit is not None:
        failure = failure_of(culprit, code)
        others = sum(1 for record in ending.records if record.ended_by_us or record.ended_by_mpi) - culprit.ended_by_mpi
        return JobResult(failure.exit_code, failure, quoted + describe_failure(failure, others))
    if ending.signalled:
        name = signal_name(ending.signalled)
        first = next((record.code for record in ending.order if record.code), 0)
        return JobResult(first, None, f"{quoted}mpiplus run: {name} was passed on to the ranks")
    if code or any(record.code != 0 for record in ending.records):
        return JobResult(code or 1, None, said + _ended_by_launcher(ending, launcher, code))
    return JobResult(0, None, quoted.rstrip())


def _not_started(ending: Ending, launcher: str, code: int) -> str:
    missing = f"; {name_ranks(ending.missing)} did not" if ending.missing else ""
    if ending.signalled:
        return f"mpiplus run: {signal_name(ending.signalled)} came before the ranks had started"
    return (
        f"mpiplus run: the job did not start: {ending.trouble}{missing} ({launcher}: exit code {code}). "
        f"To see the command line: mpiplus run -v; what MPI is here: mpiplus info"
    )


def _ended_by_launcher(ending: Ending, launcher: str, code: int) -> str:
    words = f"mpiplus run: {launcher} ended the job with exit code {code}, and no rank had failed before"
    done = [record.rank for record in ending.order if record.code == 0]
    if done and len(done) < len(ending.records):
        words += f". {name_ranks(done).capitalize()} had ended with exit code 0, perhaps without MPI_Finalize"
    return words
