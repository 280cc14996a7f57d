"""Runs `mpiplus` itself as a user would, with the limits and the sweep of every job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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


def ended(outcome: Outcome, code: int) -> Outcome:
    """It ended by itself, with this exit code, and left nothing running."""
    if outcome.code != code:
        outcome.problem(f"not exit code {code}")
    if outcome.survivors:
        outcome.problem(f"processes outlived the job: {outcome.survivors}")
    return outcome
