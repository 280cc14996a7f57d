"""Runs `mpiplus` itself as a user would, with the limits and the sweep of every job."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fork_server
import network
from job_runs import SCRIPTS, Job, Outcome
from patience import wait_until

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
    """``mpiplus words``, once it is ready; what it prints is in the file ``output``."""
    command, environment = [MPIPLUS, *map(str, words)], job.installation.full_environment()
    with network.following(command, environment, job.directory) as process:
        wait_until(lambda: is_ready() or process.poll() is not None, 60, (job.directory / "output").read_text, 0.05)
        assert process.poll() is None, (job.directory / "output").read_text()
        yield process
