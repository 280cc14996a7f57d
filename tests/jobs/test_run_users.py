"""What users of torchrun and mpirun bring along works under `mpiplus run`, or is told in a word that helps."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from job_runs import SCRIPTS, Job
from launch_runs import launch, mpiplus, running

from torchmpi_plugin.cli import main


def test_the_users_own_master(job: Job) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23457"}
    outcome = launch(job, 2, "launched.py", "master", environment=environment)
    outcome.ended().says(r"\[rank 1\] master 127.0.0.1 23457").says_not("Exception raised from")


@pytest.mark.every_change
def test_a_variable_chooses_the_backend(job: Job) -> None:
    """Also for a program that asks first what there is, and then what it has got."""
    for name in ("gloo", "mpi", "ccl"):
        environment = {"MPIPLUS_REPLACE": f"gloo,{name}"}
        outcome = launch(job, 2, "of_users.py", "meets", name, environment=environment).ended()
        outcome.says(r"\[rank 0\] sum mpiplus \[2.0, 2.0\]", r"\[rank 1\] subgroup mpiplus gloo")


def test_others_use_the_exported_address(job: Job) -> None:
    """As clients, and as those who listen there."""
    outcome = launch(job, 2, "of_users.py", "clients").ended()
    outcome.says(*(rf"\[rank {rank}\] {name} \[2.0, 2.0\]" for rank in (0, 1) for name in ("gloo", "mpiplus")))


@pytest.mark.parametrize("replaced", ["", "gloo"])
def test_torchs_checkpoint_process_saves(job: Job, replaced: str) -> None:
    environment = {"DCP_USE_PREFIX_STORE": "1", "MPIPLUS_REPLACE": replaced}  # not in torch's process
    outcome = launch(job, 2, "of_users.py", "checkpoints", environment=environment).ended()
    outcome.says(r"\[rank 0\] saved True", r"\[rank 1\] saved True")


def test_ranks_in_a_batch_script_are_told_apart(job: Job) -> None:
    """By Slurm's variables, which are the script's own."""
    environment = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    outcome = launch(job, 2, "of_users.py", "in_slurm", environment=environment).ended()
    outcome.says(r"\[rank 0\] slurm 0 0 None", r"\[rank 1\] slurm 1 1 None")


def interrupt(job: Job, words: Sequence[object], ready: str, number: int) -> tuple[int, str]:
    """Start a job of 2 ranks, send its launcher a signal once both are ready; its code, and what it printed."""

    def is_ready() -> bool:
        return all((job.directory / f"{ready}-{rank}").exists() for rank in range(2))

    with running(job, is_ready, "run", "-np", 2, *words) as process:
        process.send_signal(number)
        return process.wait(60), (job.directory / "output").read_text()


def test_ctrl_c_is_one_line(job: Job) -> None:
    code, output = interrupt(job, [SCRIPTS / "of_users.py", "interrupted"], "ready", signal.SIGINT)
    assert sorted(output.splitlines()) == [
        "[rank 0] ready",
        "[rank 1] ready",
        "mpiplus run: SIGINT was passed on to the ranks",
    ]
    assert code == 130


@pytest.mark.fresh("PYTHONFAULTHANDLER is for the start of Python")
def test_a_crash_shows_where_python_was(job: Job) -> None:
    outcome = launch(job, 2, "of_users.py", "crashes").ended(139)
    outcome.says(r"of_users.py\", line \d+ in crashes", "rank 1 on node .* failed first: killed by SIGSEGV")


def test_a_signal_that_nobody_prepared_for(job: Job) -> None:
    """It ends nothing, and is told; the program goes on to its end."""
    script = job.directory / "waits.sh"
    script.write_text('touch waits-$RANK; for i in 1 2 3 4 5 6 7 8; do sleep 0.5; done; echo "at the end"')
    code, output = interrupt(job, ["-c", "sh", script], "waits", signal.SIGUSR2)
    assert code == 0, output
    assert output.count("at the end") == 2
    assert output.count("SIGUSR2 was not passed on to a program that it would end") == 2


def test_a_signal_goes_to_the_process_that_has_a_handler(job: Job) -> None:
    """And not to another one of the same rank, which it would end."""
    script = job.directory / "waits.sh"
    program = "trap 'echo caught; exit 0' USR1; touch waits-$RANK; while :; do sleep 0.1; done"
    script.write_text(f'sh -c "{program.replace("$", chr(92) + "$")}"; echo "the shell goes on"')
    code, output = interrupt(job, ["-c", "sh", script], "waits", signal.SIGUSR1)
    assert (code, output.count("caught"), output.count("the shell goes on")) == (0, 2, 2), output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("rnu", "-n", "2"), "No such command 'rnu'. Did you mean 'run'?"),
        (("train.py",), "mpiplus run -n 2 train.py"),
        (("run", "-n", "2", "--tee", "3", "train.py"), "--log-dir DIR"),
        (("run", "-n", "2", "-t", "3", "train.py"), "--tee is torchrun's"),
    ],
)
def test_words_that_help(words: tuple[str, ...], problem: str) -> None:
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, problem in done.output) == (2, True), done.output


def test_options_of_mpirun_and_torchrun(job: Job) -> None:
    words = ("--nproc-per-node", 2, "--nnodes", "1:1", "--standalone", "--node-rank", 0, "--world_size", 5)
    words = (*words, "--rdzv-backend", "c10d", "--rdzv_endpoint=localhost:0")
    outcome = mpiplus(job, "run", *words, SCRIPTS / "launched.py", "hello").ended()
    outcome.says("--rdzv-backend has no effect", "--rdzv-endpoint has no effect", "--node-rank has no effect")
    outcome.says("--world-size 5 is ignored", r"\[rank 1\] hello 1 2 0")


def test_a_script_that_takes_itself_for_alone(job: Job) -> None:
    """mpirun does not set what it reads; `mpiplus run` does."""
    outcome = job.run(2, "of_users.py", "defaults")
    outcome.failed("world_size is 1, but MPI started 2 ranks", "mpiplus run -n 2")
    launch(job, 2, "of_users.py", "defaults").ended()
