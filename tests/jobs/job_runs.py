"""Runs a script as an MPI job, never for longer than its limit, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fork_server
import pytest
from mpi_installations import LEAK, Installation
from patience import patient

SCRIPTS = Path(__file__).parent / "scripts"
#: Generous: the machine may be busy. What has not ended by then has hung.
SECONDS = float(os.environ.get("MPIPLUS_TEST_JOB_SECONDS", patient(180)))
#: How long processes may take to vanish once the launcher has ended.
GRACE = patient(10)
#: Within how many seconds of what went wrong a job ends: generous, the machine may be busy, and nobody's timeout.
SOON = patient(30)
#: How long a launcher may stay alone. prterun of Open MPI 5.0.11 with ULFM does so for ever once in some twenty kills:
#: its state machine waits for a mutex that its own thread holds.
ALONE = 20.0
MARK = "MPIPLUS_TEST_JOB"
CRASH = re.compile(r"Traceback|Exception ignored|Segmentation|Fatal Python error|\*\*\* Process received signal")


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and when: after ``seconds``, at ``ended_at`` on the clock of files.

    ``code`` is None where it had to be stopped at its limit.
    """

    command: str
    code: int | None
    stdout: str
    stderr: str
    survivors: list[str]
    seconds: float
    ended_at: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def problem(self, text: str) -> None:
        ending = "had to be stopped at its time limit" if self.code is None else f"exit code {self.code}"
        pytest.fail(
            f"{text}\n{self.command}: {ending}\n--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}",
            pytrace=False,
        )

    def says(self, *patterns: str) -> Outcome:
        """Each pattern is somewhere in the output."""
        for pattern in patterns:
            if not re.search(pattern, self.output):
                self.problem(f"nothing in the output matches {pattern!r}")
        return self

    def says_not(self, *patterns: str) -> Outcome:
        """No pattern is anywhere in the output."""
        for pattern in patterns:
            if found := re.search(pattern, self.output):
                self.problem(f"the output has {found.group()!r}")
        return self

    def within(self, seconds: float, since: Path | None = None) -> Outcome:
        """It took no longer; from the moment that a rank touched ``since``, where starting up is not meant."""
        if since is not None and not since.exists():
            self.problem(f"no rank came to touch {since.name}")
        took = self.seconds if since is None else self.ended_at - since.stat().st_mtime
        if took > seconds:
            self.problem(f"it took {took:.1f} s, which is more than {seconds:g} s")
        return self

    def came_to_an_end(self) -> Outcome:
        """Without help from outside, and with all its processes."""
        if self.code is None:
            self.problem("the job hung")
        if self.survivors:
            self.problem(f"processes outlived the job: {self.survivors}")
        return self

    def ended(self, code: int = 0) -> Outcome:
        """By itself, with this exit code, and with all its processes."""
        self.came_to_an_end()
        if self.code != code:
            self.problem(f"not exit code {code}")
        return self

    def succeeded(self, ranks: int) -> Outcome:
        """Exit code 0, every rank came to its end, and nothing went wrong after that."""
        self.ended()
        missing = [rank for rank in range(ranks) if f"[{rank}] end\n" not in self.stdout]
        if missing:
            self.problem(f"these ranks did not come to their end: {missing}")
        if found := CRASH.search(self.output) or LEAK.search(self.output):
            self.problem(f"the output has {found.group()!r}")
        return self

    def failed(self, *patterns: str) -> Outcome:
        """An exit code other than 0 without help from outside, and a message."""
        self.came_to_an_end()
        if self.code == 0:
            self.problem("the job ended with exit code 0")
        return self.says(*patterns)


class Job:
    """Starts scripts under one MPI."""

    def __init__(self, installation: Installation, directory: Path) -> None:
        self.installation = installation
        self.directory = directory

    def run(self, ranks: int, script: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Outcome:
        """``mpiexec -n ranks python scripts/script arguments``."""
        python_arguments = [str(SCRIPTS / script), *map(str, arguments)]
        return self.start(self.installation.command(ranks, python_arguments), environment)

    def surviving(
        self,
        ranks: int,
        script: Path,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        grace: float = GRACE,
    ) -> Outcome:
        """``mpiexec --with-ft ulfm -n ranks python script arguments``: the others live on where a rank dies."""
        if not self.installation.has_ulfm:
            pytest.skip(f"{self.installation.name} has no ULFM, and its launcher ends the job")
        command = self.installation.command(ranks, [str(script), *map(str, arguments)])
        command[1:1] = ["--with-ft", "ulfm"]
        return self.start(command, environment, grace, ALONE)

    def alone(self, script: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Outcome:
        """``python scripts/script arguments``, without a launcher."""
        return self.start([fork_server.python(), str(SCRIPTS / script), *map(str, arguments)], environment)

    def torchrun(
        self, ranks: int, script: str, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Outcome:
        """``torchrun --nproc-per-node ranks scripts/script arguments``."""
        its_ranks = {"PYTHON_EXEC": fork_server.python(), **(environment or {})}
        return self.start(torchrun(ranks, str(SCRIPTS / script), *map(str, arguments)), its_ranks)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        grace: float = GRACE,
        alone: float | None = None,
    ) -> Outcome:
        full = {**self.installation.full_environment(), **(environment or {})}
        return run_process(command, full, self.directory, grace=grace, alone=alone)


def torchrun(ranks: int, *words: str) -> list[str]:
    command = [fork_server.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, *words]


def free_port() -> int:
    """Below the ports that the system gives to whoever asks for any: nobody takes it in the meantime."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    seconds: float = SECONDS,
    grace: float = GRACE,
    alone: float | None = None,
) -> Outcome:
    """Run any command like a job: with a limit, and nothing left running after a grace.

    A launcher whose processes have all ended is ended after ``alone`` seconds, which is no failure of theirs.
    """
    mark = uuid.uuid4().hex
    outputs = [directory / f"{mark}.{name}" for name in ("stdout", "stderr")]
    started = time.time()
    # To files: a process that outlives the launcher cannot hold us up as it would with a pipe.
    with outputs[0].open("wb") as stdout, outputs[1].open("wb") as stderr:
        launcher = subprocess.Popen(
            command,
            env={**environment, MARK: mark},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        code = _wait(launcher, seconds, mark, stderr, alone)
    ended_at = time.time()
    survivors = _sweep(mark, grace)
    stdout_text, stderr_text = (path.read_text(errors="replace") for path in outputs)
    return Outcome(" ".join(command), code, stdout_text, stderr_text, survivors, ended_at - started, ended_at)


def _wait(launcher: subprocess.Popen, seconds: float, mark: str, stderr: BinaryIO, alone: float | None) -> int | None:
    until, left_alone_at = time.monotonic() + seconds, None
    while (now := time.monotonic()) < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return launcher.wait(until - now if alone is None else 1)
        left_alone_at = (left_alone_at or now) if {*_marked(mark)} <= {launcher.pid} else None
        if alone is not None and left_alone_at is not None and now > left_alone_at + alone:
            stderr.write(b"the launcher stayed after all ranks had ended\n")
            return _stop(launcher)
    for process, words in _marked(mark).items():
        stderr.write(f"running at the time limit: {process} ({_wait_channel(process)}) {words}\n".encode())
        stderr.flush()
        _signal(process, signal.SIGCONT)
        if words.startswith(f"{sys.executable} {SCRIPTS}"):
            _signal(process, signal.SIGUSR1)  # where it hangs, from its fault handler
    time.sleep(1)
    _stop(launcher)
    return None


def _stop(launcher: subprocess.Popen) -> int:
    launcher.terminate()
    try:
        return launcher.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        return launcher.wait()


def _wait_channel(process: int) -> str:
    """What the process's main thread waits for, in the kernel's words."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/wchan").read_text()
    return "unknown"


def _sweep(mark: str, grace: float) -> list[str]:
    """Kill what is left of a job after a grace; what had to be killed."""
    until = time.monotonic() + grace
    while (left := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for process in left:
        _signal(process, signal.SIGKILL)
    return list(left.values())


def _marked(mark: str) -> dict[int, str]:
    """The running processes that have a job's mark in their environment, with their command lines."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                words = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = words.decode(errors="replace").strip()
    return found


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
