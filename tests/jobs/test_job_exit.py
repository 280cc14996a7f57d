"""The end of a program is never a hang, and never a success that is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job_runs import SOON, Job, run_process

#: What a user types. The mistake is in a line of its own, and the session goes on after it.
SESSION = """
import torch, torch.distributed as dist
dist.init_process_group("mpiplus")
dist.all_reduce(torch.ones(2), op="sum")
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(tensor.tolist(), dist.get_world_size())
"""


@pytest.mark.fresh("the order of exit handlers, and the end of threads")
def test_an_exit_handler_of_before_the_world(job: Job) -> None:
    outcome = job.run(2, "exits.py", "leave_late", "handler").succeeded(2)
    assert outcome.stdout.count("has communicated") == 2


@pytest.mark.fresh("the end of threads")
@pytest.mark.parametrize("how", ["daemon", "busy_daemon"])
def test_a_daemon_at_the_end(job: Job, how: str) -> None:
    """Python does not wait for it either, whether it waits or calls again and again."""
    job.run(2, "exits.py", "leave_late", how).succeeded(2).says_not("pending", "Traceback")


@pytest.mark.fresh("the end of Python, with all of its memory and no more handlers of signals")
@pytest.mark.parametrize("how", ["frozen", "timer"])
def test_a_heap_that_is_not_collected_and_signals_that_go_on(job: Job, how: str) -> None:
    job.run(2, "exits.py", "leave_late", how).succeeded(2).says_not("Exception ignored")


@pytest.mark.fresh("the end of a Python that has started its threads itself")
def test_threads_that_outlive_the_main_thread(job: Job) -> None:
    outcome = job.run(2, "exits.py", "leave_with_threads").succeeded(2)
    assert outcome.stdout.count("thread end") == 4


@pytest.mark.parametrize("how", ["alone", "pending", "threads", "destroyed"])
def test_an_exception_on_one_rank(job: Job, how: str) -> None:
    """Also with its operations pending, its threads waiting, its groups destroyed by a finally block."""
    outcome = job.run(3, "exits.py", "one_raises", how)
    outcome.failed("Traceback", "ArithmeticError: this one is meant", r"rank 2.*ends the job")
    outcome.within(SOON, since=job.directory / "fails").says_not("came out", "Segmentation", r"\[\d\] end")
    assert not [name for name in (job.directory / "fails").read_text().split() if Path(name).exists()]


@pytest.mark.parametrize(("seconds", "words"), [(1800, r"waiting for rank 2\b"), (2, r"Not arrived: rank 2 \(left")])
def test_an_exception_that_does_not_end_the_job(job: Job, seconds: int, words: str) -> None:
    """The others hear of it from the operation that waits, at its deadline at the latest."""
    outcome = job.run(3, "exits.py", "one_raises", "alone", seconds, environment={"MPIPLUS_ABORT_ON_EXCEPTION": "0"})
    outcome.failed("ArithmeticError: this one is meant", words).says_not("rank 2 ends the job")
    outcome.within(SOON, since=job.directory / "fails")


@pytest.mark.fresh("the exit code, through the launcher alone")
@pytest.mark.parametrize(("who", "how"), [(0, "kept"), (2, "kept"), (2, "destroyed"), (2, "SystemExit"), (2, "mpi4py")])
def test_sys_exit_on_one_rank(job: Job, who: int, how: str) -> None:
    """It ends the job, with its own code, as the others wait for it; rank 0 hosts the store. MPI may be mpi4py's."""
    outcome = job.run(3, "exits.py", "one_exits", who, how)
    outcome.failed(rf"rank {who} ends the job: exit code 3").says_not("came out", "Segmentation", r"\[\d\] end")
    outcome.ended(3).within(SOON, since=job.directory / "fails")


def test_all_ranks_exit_with_an_error(job: Job) -> None:
    job.run(2, "exits.py", "all_exit").failed().says_not("ends the job", "Traceback")


@pytest.mark.under_each
@pytest.mark.parametrize(("ranks", "what", "grace"), [(1, "program", 1), (2, "program", 10), (2, "MPI", 1)])
def test_an_operation_pending_at_the_end(job: Job, ranks: int, what: str, grace: int) -> None:
    outcome = job.run(ranks, "exits.py", "pending", what, environment={"MPIPLUS_EXIT_GRACE": str(grace)})
    outcome.failed("still pending at exit", rf"recv.* from rank {ranks - 1}\b", "rank 0 ends the job")
    outcome.says_not("Segmentation")


def test_an_operation_pending_when_its_group_is_destroyed(job: Job) -> None:
    job.run(2, "exits.py", "pending", "group").succeeded(2).says("is destroyed with 1 operation pending: recv")


@pytest.mark.fresh("signals, as the launcher has set them")
def test_ctrl_c_in_a_collective(job: Job) -> None:
    """Not measured: an interrupt inside coverage's trace function leaves its lock taken for ever."""
    job.run(2, "exits.py", "interrupted", job.directory, environment={"MPIPLUS_TEST_COVERAGE": ""}).succeeded(2)


@pytest.mark.fresh("signals, as the launcher has set them")
def test_ctrl_c_that_nobody_catches(job: Job) -> None:
    outcome = job.run(2, "exits.py", "interrupt_not_caught")
    outcome.failed("KeyboardInterrupt", "rank 1 ends the job").says_not("came out", r"\[\d\] end")


def test_an_interactive_session(job: Job) -> None:
    """A world of one in Python's own prompt, left by the end of the input."""
    session = job.directory / "session"
    session.write_text(SESSION)
    command = ["sh", "-c", f"{sys.executable} -i < {session}"]
    outcome = run_process(command, job.installation.full_environment(), job.directory).ended()
    outcome.says(r"\[1\.0, 1\.0\] 1", "TypeError|RuntimeError").says_not("Segmentation", "Fatal", "ends the job")
