"""Runs `mpiplus` itself as a user would, with the limits and the sweep of every job."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fork_server
from job_runs import SCRIPTS, Job, Outcome

#: The command beside this Python; as a module it would import from the working directory.
MPIPLUS = str(Path(sys.executable).with_name("mpiplus"))
MPIPLUS_MODULE = ["-m", "torchmpi_plugin.cli"]
#: Leaves the launcher's process number where a rank can read it, to send it a signal.
WITH_NUMBER = ["sh", "-c", 'echo $$ > launcher; exec "$@"', "sh"]


def mpiplus(job: Job, *words: object, environment: Mapping[str, str] | None = None) -> Outcome:
    """``mpiplus words``, with this job's MPI."""
    its_ranks = {"PYTHON_EXEC": fork_server.python(), **(environment or {})}
    return job.start([*WITH_NUMBER, MPIPLUS, *map(str, words)], its_ranks)


def launch(
    job: Job, ranks: int, *words: object, options: tuple[object, ...] = (), **more: Mapping[str, str]
) -> Outcome:
    """``mpiplus run -n ranks options scripts/words``."""
    return mpiplus(job, "run", "-n", ranks, *options, SCRIPTS / str(words[0]), *words[1:], **more)


@contextlib.contextmanager
def running(job: Job, is_ready: Callable[[], bool], *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """``mpiplus words``, once it is ready; what it prints is in the file ``log``."""
    log = job.directory / "log"
    with log.open("wb") as output:
        command, environment = [MPIPLUS, *map(str, words)], job.installation.full_environment()
        process = subprocess.Popen(command, env=environment, cwd=job.directory, stdout=output, stderr=output)
        try:
            until = time.monotonic() + 60
            while not is_ready():
                assert time.monotonic() < until and process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def ended(outcome: Outcome, code: int) -> Outcome:
    """It ended by itself, with this exit code, and left nothing running."""
    if outcome.code != code:
        outcome.problem(f"not exit code {code}")
    if outcome.survivors:
        outcome.problem(f"processes outlived the job: {outcome.survivors}")
    return outcome
