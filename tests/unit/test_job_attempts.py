"""How a job ended, which rank is to blame, and what is said about it; when it is started again, and where."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchmpi_plugin.jobs import job as attempts
from torchmpi_plugin.jobs.job import Attempts, NotEnoughError, SpareNodes, is_worth_another, kind_of
from torchmpi_plugin.jobs.outcome import Ending, JobResult, RankFailure, RankRecord, result_of
from torchmpi_plugin.jobs.spec import JobSpec
from torchmpi_plugin.jobs.stderr import TRACEBACK, StderrTail
from torchmpi_plugin.launchers.layout import allocated_nodes
from torchmpi_plugin.names import NOT_ARRIVED

SPEC = JobSpec(["true"], nproc=2)


def test_a_job_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert Path(SPEC.environment()["HOME"]).is_dir()
    assert JobSpec(["true"], nproc=2, env={"HOME": "/else"}).environment()["HOME"] == "/else"


def ended(rank: int = 1, **more: object) -> Ending:
    """One rank of three has failed."""
    ending = Ending([RankRecord(number, f"h{number}", code=143, signal=15, ended_by_us=True) for number in range(3)])
    record = ending.records[rank]
    record.ended_by_us, record.signal = False, 0
    for name, value in more.items():
        setattr(record, name, value)
    return ending


def failed(code: int, rank: int = 1) -> JobResult:
    return JobResult(code, RankFailure(rank, f"h{rank}", code, ""), f"rank {rank} failed")


@pytest.mark.parametrize(
    ("result", "ending", "kind"),
    [
        (JobResult(0, None), ended(), ""),
        (failed(3), ended(code=3), "exit"),
        (failed(137), ended(code=137, signal=9), "signal"),
        (failed(1), ended(code=None, gone=True), "lost"),
        (JobResult(124, None), Ending([], is_timeout=True), "timeout"),
        (JobResult(130, None), Ending([], signalled=2), ""),
        (JobResult(1, None), Ending([], trouble="the ranks did not come up"), ""),
        (JobResult(1, None), Ending([], trouble="not all came", missing=[2]), "lost"),
    ],
)
def test_how_an_attempt_ended(result: JobResult, ending: Ending, kind: str) -> None:
    assert kind_of(result._replace(ending=ending)) == kind


@pytest.mark.parametrize(
    ("kind", "code", "on", "is_worth"),
    [
        ("exit", 3, "signal,3", True),
        ("exit", 3, "signal,4", False),
        ("exit", 127, "any", False),  # there is no such program
        ("exit", 127, "127", True),
        ("signal", 137, "exit,signal", True),
        ("", 0, "any", False),
    ],
)
def test_which_ends_are_worth_another_attempt(kind: str, code: int, on: str, is_worth: bool) -> None:
    assert is_worth_another(kind, code, on.split(",")) == is_worth


class Job:
    """Ends as the test says, attempt by attempt."""

    def __init__(self, *results: tuple[JobResult, Ending]) -> None:
        self.results = list(results)
        self.attempts: list[JobSpec] = []
        self.told: list[str] = []

    def start(self, spec: JobSpec) -> JobResult:
        self.attempts.append(spec)
        result, ending = self.results[spec.attempt]
        return result._replace(ending=ending)

    def run(self, most: int, nodes: SpareNodes | None = None) -> JobResult:
        return Attempts(replace(SPEC, max_restarts=most), nodes, self.told.append, start=self.start).run()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(attempts, "pause", lambda seconds, announce: announce() or waited.append(seconds) or 0)
    return waited


FAILED = (failed(3), ended(code=3))
DONE = (JobResult(0, None), Ending([]))


def test_fast_failures_wait_longer_each_time(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(*[FAILED] * 9)
    assert job.run(8).returncode == 3
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    pauses.clear()
    monkeypatch.setattr(attempts, "FAST_SECONDS", 0.0)
    job = Job(FAILED, DONE)
    assert job.run(8).returncode == 0
    assert pauses == [0]


def node_choice(answering: Callable[[str], bool], least: int = 1, most: int = 2, names: str = "a b c") -> SpareNodes:
    return SpareNodes(names.split(), 2, least, most, answering)


def lost_on(node: int) -> tuple[JobResult, Ending]:
    """Ranks 0 and 1 were on one node, 2 and 3 on the next."""
    ending = Ending([RankRecord(rank, "ab"[rank // 2], code=143, ended_by_us=True) for rank in range(4)])
    for record in ending.records[2 * node : 2 * node + 2]:
        record.code, record.gone = None, True
    return failed(1, 2 * node), ending


def test_a_lost_node_is_left_out(pauses: list[float]) -> None:
    """A spare one takes its place; without one the job is smaller."""
    job = Job(lost_on(1), DONE)
    assert job.run(3, node_choice(lambda name: name != "b")).returncode == 0
    assert [(attempt.hosts, attempt.nnodes) for attempt in job.attempts] == [("a:2,b:2", 2), ("a:2,c:2", 2)]
    assert "b no longer answers and will be left out" in job.told[0]
    job = Job(lost_on(0), DONE)
    job.run(3, node_choice(lambda name: name != "a", names="a b"))
    assert [attempt.hosts for attempt in job.attempts] == ["a:2,b:2", "b:2"]


def test_too_few_nodes(pauses: list[float]) -> None:
    job = Job(lost_on(1))
    result = job.run(3, node_choice(lambda name: name == "a", least=2, names="a b"))
    assert result.returncode == 1
    assert "needs 2 nodes (--nnodes), and there are 1: a" in result.message
    with pytest.raises(NotEnoughError):
        node_choice(lambda _: True, least=4).choose()


def test_nodes_of_an_allocation(tmp_path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    assert allocated_nodes({"PBS_NODEFILE": str(tmp_path / "nodes")}) == ["n1", "n2"]
    assert allocated_nodes({"PBS_NODEFILE": "nowhere"}) == allocated_nodes({}) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_as_a_restart_is_announced(number: int) -> None:
    """Before the pause has begun to handle signals."""

    def tell(line: str) -> None:
        os.kill(os.getpid(), number)

    job = Job(FAILED, FAILED)
    result = Attempts(replace(SPEC, max_restarts=1), None, tell, start=job.start).run()
    assert result.returncode == 128 + number
    assert len(job.attempts) == 1
    assert signal.getsignal(number) is signal.SIG_DFL


def records(**of_each: Any) -> list[RankRecord]:
    return [RankRecord(rank, node=f"h{rank}", **of_each) for rank in range(3)]


def ending(found: list[RankRecord], order: list[int], **more) -> Ending:
    return Ending(found, [found[rank] for rank in order], **{"launcher_code": 1, **more})


def test_an_abort_is_known_by_its_last_words() -> None:
    """mpirun has killed all; one of them had said why."""
    found = records(code=137, signal=9, ended_by_mpi=True)
    found[1].heard(["Traceback (most recent call last)\n", "ValueError: no\n"], 5.0)
    found[0].heard(["Traceback (most recent call last)\n", "DistBackendError: rank 1 has gone\n"], 6.0)
    result = result_of(ending(found, [0, 1, 2], launcher_code=6), "mpirun")
    assert result.failure is not None
    assert (result.failure.rank, result.failure.exit_code) == (1, 6)
    assert result.failure.traceback.endswith("ValueError: no\n")
    assert result.message.splitlines()[-1].startswith("mpiplus run: rank 1 on node h1 failed first: ended the job")


def test_the_last_line_says_who_what_and_where() -> None:
    """Once, of all ranks that say the same; without the traceback, which stands above, unless that was not shown."""
    found = records(code=1)
    for record in found:
        lines = [f"{TRACEBACK}:\n", '  File "a/train.py", line 5, in step\n', "    loss()\n"]
        lines += [
            '  File "/x/site-packages/torch/y.py", line 7, in all_reduce\n',
            f"ValueError: bad on {record.rank}\n",
        ]
        record.heard(lines, 1.0)
    what = "mpiplus run: rank 1 on node h1 failed first: exit code 1 (ValueError: bad on 1, at a/train.py:5 in step)"
    assert result_of(ending(found, [1, 0, 2]), "mpirun").message == f"{what}; the same on ranks 0, 1, 2"
    found[1].hidden = found[0].ended_by_mpi = True  # it had said the same
    message = result_of(ending(found, [1, 0, 2]), "mpirun").message
    assert "\n    ValueError: bad on 1\n" in message and message.endswith("the same on ranks 0, 1, 2")


def test_who_is_late_is_to_blame() -> None:
    """Not the one that waited for it."""
    found = records()
    found[0].code = 1
    doing = "rank 1 (does not wait; its last call was barrier (group '0'), at train.py:6 in step)"
    error = f"E: all_reduce timed out on rank 0. {NOT_ARRIVED}{doing}; arrived: ranks 0, 2"
    found[0].heard([f"{TRACEBACK}:\n", '  File "train.py", line 9, in step\n', f"{error}\n"], 1.0)
    message = result_of(ending(found, [0]), "mpirun").message
    assert message == f"mpiplus run: {doing} did not come; rank 0 on node h0 gave up waiting first: exit code 1"
    found[0].heard([f"{TRACEBACK}:\n", f"{error.replace('barrier', 'barrier' * 60)}\n"], 2.0)  # too long to be shown
    assert "run: rank 1 did not come; rank 0" in result_of(ending(found, [0]), "mpirun").message


def test_nobody_to_blame() -> None:
    found = records(code=137, signal=9, ended_by_mpi=True)
    result = result_of(ending(found, [1, 0, 2], noise="a long story"), "mpirun")
    assert (result.returncode, result.failure) == (1, None)
    assert "a long story" in result.message
    assert "no rank had failed before" in result.message


def tail_of(text: str) -> str:
    tail = StderrTail()
    for line in text.splitlines(keepends=True):
        tail.add(line)
    return tail.text()


def test_a_long_traceback_is_kept() -> None:
    """As far as 400 lines; of a longer one its start and its end."""
    frames = "".join(f"  File number {number}\n" for number in range(200))
    text = f"Traceback (most recent call last):\n{frames}ValueError: no\n"
    assert tail_of("noise\n" * 50 + text) == text
    text = f"Traceback (most recent call last):\n{frames * 4}ValueError: no\n"
    lines = tail_of(text).splitlines()
    assert len(lines) == 401
    assert (lines[0], lines[1], lines[-1]) == (text.splitlines()[0], "  File number 0", "ValueError: no")
    assert lines[100] == "... 402 lines left out ..."


def test_output_that_nobody_has_read() -> None:
    found = records()
    assert "the last 7 characters of output are lost" in result_of(ending(found, [], unread=7), "mpirun").message
