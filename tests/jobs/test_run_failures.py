"""However a job under `mpiplus run` ends, it ends soon, whole, and with the failing rank's name and code."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from typing import Any

import pytest
from job_runs import Job
from launch_runs import MPIPLUS, launch
from patience import patient

pytestmark = pytest.mark.fresh("supervisors and daemons, which ranks find as their parents, are killed and stopped")

HOST = re.escape(platform.node())


def last_line(outcome) -> str:
    return outcome.stderr.rstrip().splitlines()[-1]


def test_an_exception_on_one_rank_of_a_group(job: Job) -> None:
    """The others wait in a collective; the traceback stands once, and the last line says who, what and where."""
    outcome = launch(job, 3, "exits.py", "one_raises", "alone").ended(1)
    what = r"ArithmeticError: this one is meant, at .*/exits.py:\d+ in \w+"
    line = rf"mpiplus run: rank 2 on node {HOST} failed first: .* \({what}\)"
    assert re.match(line, last_line(outcome)), outcome.output
    assert outcome.stderr.count("\n[rank 2] ArithmeticError: this one is meant") == 1
    outcome.says_not("the last lines of rank 2", "came out", r"\[rank2\]")  # which torch writes before each line


def test_an_exit_code(job: Job) -> None:
    """It is no signal's; other codes are in other tests."""
    outcome = launch(job, 3, "launched.py", "exits", 137).ended(137)
    assert "failed first: exit code 137; 2 other ranks were ended" in last_line(outcome)
    outcome.says(f"rank 2 on node {HOST}", r"\n    the last words\n")


@pytest.mark.parametrize("how", ["kept", "exit"])
def test_an_exit_code_that_others_fail_of(job: Job, how: str) -> None:
    """They wait for the rank, and hear from the store that it leaves, before its process has ended."""
    outcome = launch(job, 3, "exits.py", "one_exits", 2, how).ended(3)
    assert f"rank 2 on node {platform.node()} failed first: exit code 3" in last_line(outcome), outcome.output


#: By what becomes of the last rank while the others wait in MPI: ranks, the job's code, what is said of it and beside.
DEATHS: dict[str, tuple[Any, ...]] = {
    "killed": (3, 137, "failed first: killed by SIGKILL"),
    "aborts": (3, 5, "failed first", r"\n    this is why\n"),
    "supervisor": (2, 1, "failed first: lost without a word"),  # nothing is known of its program, which must not go on
    "left": (3, 70, "ended with exit code 0, but without MPI_Finalize"),  # neither a success, nor without a name
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_death(job: Job, how: str) -> None:
    ranks, code, said, *more = DEATHS[how]
    outcome = launch(job, ranks, "launched.py", "dies", how).ended(code)
    outcome.says(f"rank {ranks - 1} on node {HOST} {said}", *more)


def test_a_launcher_that_is_killed(job: Job) -> None:
    """The ranks notice, and end."""
    launch(job, 2, "launched.py", "dies", "launcher").ended(-9)


def test_the_grace_and_what_ranks_have_started(job: Job) -> None:
    """Ranks that ignore SIGTERM, and their children."""
    outcome = launch(job, 2, "launched.py", "leaves_a_child", options=("--grace", 0.5))
    outcome.ended(4).says("rank 1 on node .* failed first: exit code 4")


def test_the_time_limit(job: Job) -> None:
    outcome = launch(job, 2, "launched.py", "sleeps", options=("--timeout", patient(10)))  # to start in
    outcome.ended(124).says("the time limit has passed; ranks 0, 1 had not ended")


def test_a_supervisor_that_is_stopped(job: Job) -> None:
    """It obeys no order. The job ends without it, and it is ended too."""
    outcome = launch(job, 2, "launched.py", "dies", "stopped", options=("--timeout", patient(12), "--grace", 1))
    outcome.ended(124).says(f"rank 1 on node {HOST} did not answer the order to end")


@pytest.mark.under_each
def test_the_mpis_daemon_is_killed(job: Job) -> None:
    """MPICH's launcher does not notice; Open MPI's is the daemon of its own node."""
    outcome = launch(job, 2, "launched.py", "dies", "daemon").within(60).failed()
    if job.installation.vendor != "Open MPI":
        outcome.says("the MPI's daemon on node .* has died, which had started this rank")


def test_survivors_go_on_where_the_user_asks_for_it(job: Job) -> None:
    by_vendor = "--enable-recovery" if job.installation.vendor == "Open MPI" else "-disable-auto-cleanup"
    option = "--with-ft ulfm" if job.installation.has_ulfm else by_vendor
    outcome = launch(job, 3, "launched.py", "one_goes_on", options=("--mpi-args", option))
    outcome.ended().says(r"\[rank 0\] went on", r"\[rank 1\] went on", "rank 2 on node .* was killed by SIGKILL")


def test_a_reader_that_does_not_read(job: Job) -> None:
    """The time limit counts all the same."""
    read, write = os.pipe()
    words = [MPIPLUS, "run", "-n", "2", "--timeout", "5", "--grace", "1", "-c", "yes"]
    environment = job.installation.full_environment()
    job_process = subprocess.Popen(words, env=environment, cwd=job.directory, stdout=write, stderr=write)
    os.close(write)
    try:
        assert job_process.wait(60) == 124
    finally:
        job_process.kill()
        os.close(read)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_are_passed_on_once(job: Job, name: str) -> None:
    """The ranks handle it and end well, so all is well."""
    outcome = launch(job, 2, "launched.py", "signalled", name).ended()
    outcome.says(rf"\[rank 0\] got {name} 1 time", rf"\[rank 1\] got {name} 1 time")
