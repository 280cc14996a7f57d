"""`mpiplus run --max-restarts`: what is started again, how often, and what ends it for good."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from job_runs import SCRIPTS, Job, Outcome, run_process
from launch_runs import MPIPLUS, launch, running
from patience import patient

RESUME = Path(__file__).parents[2] / "docs/examples/resume.py"


def restarted(job: Job, how: object, times: int, *options: object) -> Outcome:
    return launch(job, 2, "launched.py", "fails", how, times, options=("--max-restarts", 2, *options))


KILLS_ITS_PARENT = pytest.param("supervisor", marks=pytest.mark.fresh("its parent is to be the supervisor"))


@pytest.mark.parametrize("how", ["SIGKILL", KILLS_ITS_PARENT, "3"])
def test_after_a_rank_has_failed(job: Job, how: str) -> None:
    """The second attempt comes to its end; each line says which attempt it is of, and what had failed is told."""
    outcome = restarted(job, how, 1).ended()
    outcome.says(r"\[rank 0\] attempt 0 of 2", r"\[rank 0, restart 1\] attempt 1 of 2", "restart 1 of at most 2")
    outcome.says("mpiplus run: rank 1 on node .* failed first: ", r"\[rank 1, restart 1\] at the end")
    outcome.says_not("restart 2")


def test_the_last_restart(job: Job) -> None:
    """The code is that of the last attempt, and each attempt's failure is told."""
    outcome = restarted(job, "3", 9).ended(3)
    outcome.says("restart 1 of at most 2 in 1 s", "restart 2 of at most 2 in 2 s", "restart 2 was the last")
    assert outcome.stderr.count("rank 1 on node") >= 3, outcome.stderr


def test_an_end_that_is_not_worth_it(job: Job) -> None:
    """Others are in tests/unit/test_job_attempts.py."""
    restarted(job, "3", 1, "--restart-on", "signal,4").ended(3).says_not("restart 1")


@pytest.mark.slow
def test_an_attempt_that_takes_too_long(job: Job) -> None:
    """It is ended, and the next one comes; the limit of the whole ends it for good."""
    outcome = restarted(job, "sleeps", 1, "--attempt-timeout", patient(10), "--grace", 1).ended()
    outcome.says("the time limit has passed; rank", r"\[rank 1, restart 1\] at the end")


@pytest.mark.slow
def test_the_time_of_the_whole(job: Job) -> None:
    options = ("--timeout", 18, "--attempt-timeout", 10, "--grace", 1)  # the second attempt would need longer
    restarted(job, "sleeps", 9, *options).ended(124).says("restart 1 of at most 2").says_not("restart 2 of")


def test_files_of_attempts(job: Job) -> None:
    options = ("--stdout", "{attempt}/{rank}.out", "--stderr", "{rank}.err")
    restarted(job, "SIGKILL", 1, *options).ended()
    assert "attempt 0 of 2" in (job.directory / "0/1.out").read_text()
    assert "attempt 1 of 2" in (job.directory / "1/1.out").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("when", ["running", "between"])
def test_signals_end_it_for_good(job: Job, number: int, code: int, when: str) -> None:
    log = job.directory / "output"
    words, is_ready = [SCRIPTS / "launched.py", "waits"], (job.directory / "waits-0-0").exists
    if when == "between":
        words, is_ready = ["-c", "false"], lambda: "restart 3 of at most 9 in 4 s" in log.read_text()
    with running(job, is_ready, "run", "-n", 1, "--max-restarts", 9, *words) as process:
        process.send_signal(number)
        assert process.wait(60) == code, log.read_text()
    assert when == "between" or "restart" not in log.read_text()


def losses(text: str) -> dict[int, str]:
    """Of each step, to the bit; the last attempt's word counts."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss \S+ (\S+)", text)}


def resume(job: Job, ranks: int, *words: object, options: tuple[object, ...] = ()) -> Outcome:
    command = [MPIPLUS, "run", "-n", ranks, *options, RESUME, *words]
    return run_process(list(map(str, command)), job.installation.full_environment(), job.directory)


@pytest.mark.slow
def test_training_ends_with_the_same_losses(job: Job) -> None:
    whole = resume(job, 2, "--directory", "whole").ended()
    outcome = resume(job, 2, "--directory", "cut", "--kill", 1, options=("--max-restarts", 1)).ended()
    outcome.says("2 ranks begin at step 1[05]")
    assert len(losses(whole.stdout)) == 30
    assert losses(outcome.stdout) == losses(whole.stdout)
    died, began = (float(text) for text in re.findall(r"(?:dies|step 1\d,) at (\S+)", outcome.stdout))
    print(f"{began - died:.1f} s from the death to the next step", file=sys.stderr)


@pytest.mark.slow
def test_torchruns_own_restarts(job: Job) -> None:
    """Its second attempt is a new MPI world, on the ranks that it has started again."""
    words = ("--directory", job.directory / "cut", "--kill", 1)
    outcome = job.torchrun(2, str(RESUME), *words, environment={"PET_MAX_RESTARTS": "1"})
    if job.installation.vendor == "Open MPI":
        outcome.failed("were not started by MPI")
    else:
        outcome.ended().says("2 ranks begin at step 0", "2 ranks begin at step 1[05]")
        assert sorted(losses(outcome.stdout)) == list(range(1, 31))


@pytest.mark.slow
def test_a_checkpoint_that_was_half_written(job: Job) -> None:
    resume(job, 2, "--at", 12, "--kill", 1).ended(137)
    os.makedirs(job.directory / "checkpoints/step-25")
    (job.directory / "checkpoints/step-25/__0_0.distcp").write_bytes(b"cut off")
    resume(job, 2).ended().says("2 ranks begin at step (5|10),")


@pytest.mark.slow
@pytest.mark.under_each
@pytest.mark.parametrize("how", [(), ("--fsdp",)])
def test_the_others_go_on(job: Job, how: tuple[str, ...]) -> None:
    """Without a restart, where MPI has ULFM: three ranks' training ends on two."""
    if not job.installation.has_ulfm:
        pytest.skip(f"{job.installation.name} has no ULFM")
    whole = losses(resume(job, 3, *how, "--directory", "whole").ended().stdout)
    options = ("--mpi-args", "--with-ft ulfm")
    outcome = resume(job, 3, *how, "--survive", "--kill", 1, options=options).ended()
    outcome.says("goes on after .*rank 1 .*has ended", "2 ranks begin at step 1[05],").says_not("restart")
    check_alike(losses(outcome.stdout), whole)


def check_alike(found: dict[int, str], whole: dict[int, str]) -> None:
    """Sums in another order differ in their last bits."""
    assert sorted(found) == sorted(whole) == list(range(1, 31))
    for step, loss in found.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(whole[step]), rel=1e-4)


@pytest.mark.slow
def test_fsdp_goes_on_with_fewer_ranks(job: Job) -> None:
    """The shards of three ranks are read by two."""
    whole = losses(resume(job, 3, "--fsdp", "--directory", "whole").ended().stdout)
    cut = resume(job, 3, "--fsdp", "--kill", 1).ended(137)
    outcome = resume(job, 2, "--fsdp").ended().says("2 ranks begin at step 1[05],")
    check_alike({**losses(cut.stdout), **losses(outcome.stdout)}, whole)
