"""`mpiplus status` answers while ranks are stuck, stopped or gone, and only to the job's user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import fork_server
import network
import pytest
from job_runs import SCRIPTS, Job, torchrun
from launch_runs import MPIPLUS
from patience import patient, wait_until

RANKS = 3


@contextlib.contextmanager
def running(job: Job, command: Sequence[str], ranks: int = RANKS) -> Iterator[dict[str, str]]:
    """A job whose ranks are ready; the environment in which to ask for it."""
    directory = job.directory / "sockets"
    environment = {**job.installation.full_environment(), "MPIPLUS_STATUS_DIRECTORY": str(directory)}
    environment["PYTHON_EXEC"] = fork_server.python()
    with network.following(command, environment, job.directory) as process:
        signs = [job.directory / f"ready-{rank}" for rank in range(ranks)]
        try:
            network.wait_for(signs, 120, job.directory / "output", process)
            for sign in signs:
                sign.unlink()  # another job's ranks may say so too
            yield environment
        finally:
            end_ranks(directory)


def end_ranks(directory: Path) -> None:
    """Those that have a socket there; others the launcher takes with it."""
    for file in directory.glob("*.sock"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.name.split(".")[2]), signal.SIGKILL)


def ranks_of(job: Job, where: str) -> list[str]:
    return job.installation.command(RANKS, [str(SCRIPTS / "asked.py"), where])


def asked(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [MPIPLUS, "status", *map(str, words)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)


def told_when_waiting(environment: dict[str, str], who: str = "ranks 0, 2 wait") -> str:
    """What is told once some wait for rank 1: who waits takes its time to see for whom."""
    until = time.monotonic() + 60
    while f"  rank 1 is behind: {who} for it in group default_pg" not in (told := asked(environment).stdout):
        assert time.monotonic() < until, told
        time.sleep(0.5)
    return told


@pytest.mark.parametrize("where", ["sleeps", "loops", "holds_the_gil"])
def test_a_rank_that_others_wait_for(job: Job, where: str) -> None:
    """Under plain mpirun. It is named first, with who waits; its stacks say where it is, whoever has the GIL."""
    with running(job, ranks_of(job, where)) as environment:
        told = told_when_waiting(environment)
        lines = told.splitlines()
        assert "asked.py" in lines[0] and "3 ranks on 1 node," in lines[0]
        assert "rank 1 is behind" in lines[3]
        assert re.search("(?m)^ +0 .* in all_reduce #51 of 8 bytes .default_pg. for [0-9.]+ s, waits for rank 1$", told)
        assert re.search("(?m)^ +1 .* elsewhere for [0-9.]+ s, after all_reduce #50 of 8 bytes", told)
        stacks = asked(environment, "--stacks", 1).stdout
        assert re.search(rf"asked.py\", line \d+ in {where}\n", stacks), stacks
        assert "rank 0 (process" in asked(environment, "--stacks").stdout


def test_a_rank_that_is_stopped(job: Job) -> None:
    with running(job, ranks_of(job, "stops")) as environment:
        told_when_waiting(environment)
        told = status_json(environment)
        assert re.match(r"rank 1 does not answer: process \d+: stopped", told["attention"][0])
        assert told["attention"][1].startswith("rank 1 is behind: ranks 0, 2 wait for it")
        assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
        assert told["ranks"][0]["groups"][0]["missing"] == [1]


def test_before_there_is_a_group(job: Job) -> None:
    """Nobody answers, and it is said since when somebody would."""
    with running(job, [MPIPLUS, "run", "-n", str(RANKS), str(SCRIPTS / "asked.py"), "begins"]) as environment:
        told = asked(environment)
        assert (told.returncode, "has called init_process_group with mpiplus" in told.stdout) == (1, True)


@pytest.mark.every_change
def test_a_rank_that_is_killed(job: Job) -> None:
    """Open MPI lets the others go on if asked to; MPICH's launcher ends them, and there is no job to ask."""
    lets_go_on = job.installation.vendor == "Open MPI"
    command = ranks_of(job, "everybody")
    after_mpiexec = command.index(job.installation.mpiexec) + 1
    command[after_mpiexec:after_mpiexec] = ["--enable-recovery"] if lets_go_on else []
    with running(job, command) as environment:
        (socket,) = (job.directory / "sockets").glob("*.1.*.sock")
        os.kill(int(socket.name.split(".")[2]), signal.SIGKILL)
        wait_until(lambda: len(status_json(environment).get("ranks", [])) == RANKS * lets_go_on, 30)
        assert not socket.exists()
        if lets_go_on:
            told = status_json(environment)
            assert told["attention"] == [
                "rank 1 does not answer: on another node, which may be cut off, or it has ended"
            ]
            assert [rank["answer"] is not None for rank in told["ranks"]] == [True, False, True]


def status_json(environment: dict[str, str]) -> dict:
    return json.loads(asked(environment, "--json").stdout)


def test_under_mpiplus_run_and_in_a_subprocess_of_torchrun(job: Job) -> None:
    command = [MPIPLUS, "run", "-n", str(RANKS), str(SCRIPTS / "asked.py"), "sleeps"]
    with running(job, command) as environment:
        told_when_waiting(environment)
    if job.installation.vendor != "Open MPI":
        with running(job, torchrun(RANKS, str(SCRIPTS / "asked.py"), "sleeps")) as environment:
            told_when_waiting(environment)


@pytest.mark.every_change
def test_two_jobs_with_one_port_of_which_one_ends(job: Job) -> None:
    """Both are listed, and nobody's answer is taken for the other's; who watches sees the end."""

    def command(where: str) -> list[str]:
        words = [str(SCRIPTS / "asked.py"), "file", str(job.directory / where)]
        return ["env", "MASTER_PORT=29876", *job.installation.command(2, words)]

    with running(job, command("here"), 2) as environment:
        assert "2 ranks" in asked(environment, "29876").stdout
        with running(job, command("there"), 2):
            listed = asked(environment).stdout
            names = re.findall(r"(?m)^job (29876-[0-9a-f]{4}): .*asked.py file .*: 2 ranks", listed)
            assert len(set(names)) == 2, listed
            assert "several jobs have the port 29876: name one of" in asked(environment, "29876").stderr
            words = [MPIPLUS, "status", "--watch", names[0]]  # the job's number, not the option's
            watch = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
            time.sleep(patient(3))  # until it has found the job
            assert watch.poll() is None
    output, _ = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert f"job {names[0]} has ended" in output


def test_nobody_to_ask(job: Job) -> None:
    environment = {**job.installation.full_environment(), "MPIPLUS_STATUS_DIRECTORY": str(job.directory / "none")}
    told = asked(environment)
    assert (told.returncode, "no job of this user" in told.stdout) == (1, True)
    told = asked(environment, "--json")
    assert (told.returncode, json.loads(told.stdout)) == (1, {})
    assert "there is none" in asked(environment, "12345").stderr


def test_after_destroy(job: Job) -> None:
    """The process still answers: it has no group."""
    with running(job, ranks_of(job, "destroyed")) as environment:
        told = asked(environment).stdout
        assert told.count("has no group") == RANKS, told


def test_a_directory_that_others_may_enter(job: Job) -> None:
    """No rank puts a socket there, and nobody believes one that is there."""
    (job.directory / "sockets").mkdir()
    (job.directory / "sockets").chmod(0o755)
    with running(job, ranks_of(job, "sleeps")) as environment:
        assert list((job.directory / "sockets").iterdir()) == []
        told = asked(environment)
        assert (told.returncode, "no directory of this user's alone" in told.stderr) == (1, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_told_nothing(job: Job) -> None:
    """Neither through the directory nor, if somebody has opened that, by the process."""
    with running(job, ranks_of(job, "sleeps")) as environment:
        sockets = job.directory / "sockets"
        assert sockets.stat().st_mode & 0o777 == 0o700
        path = next(sockets.glob("*.0.*.sock"))
        for directory in (sockets, *sockets.parents):
            with contextlib.suppress(PermissionError):
                directory.chmod(directory.stat().st_mode | 0o005)
        path.chmod(0o777)
        program = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(10); "
            "os.chdir(sys.argv[1]); s.connect(sys.argv[2]); s.send(b'status\\n'); print('told', s.recv(100))"
        )
        told = subprocess.run(
            [sys.executable, "-S", "-c", program, str(path.parent), path.name],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert "told b''" in told.stdout or "PermissionError" in told.stderr or "ConnectionReset" in told.stderr, told


def test_it_can_be_switched_off(job: Job) -> None:
    command = ["env", "MPIPLUS_STATUS=0", *ranks_of(job, "sleeps")]
    with running(job, command) as environment:
        assert asked(environment).returncode == 1
