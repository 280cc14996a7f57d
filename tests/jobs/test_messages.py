"""What is said of common mistakes: first what is wrong, then what to do; the last line says who, what and where."""

from __future__ import annotations

import re

import pytest
from job_runs import SCRIPTS, Job
from launch_runs import mpiplus

MISTAKES = {
    "shapes": r"failed first: .*\(DistBackendError: the ranks disagree: rank \d .*, at .*mistaken.py:\d+ in shapes\); "
    r"the same on ranks 0, 1, 2",
    "late": r"mpiplus run: rank 1 \(.*, at mistaken.py:\d+ in late\) did not come; rank [02] on node .* gave up",
    "port": r"failed first: .*\(DistBackendError: init_process_group: .*port \d+ on .* \(MASTER_PORT, or "
    r"init_method's\) is in use: by another job, or .* Give each job a port of its own",
    "module": r"failed first: .*\(RuntimeError: mpi4py is not installed, through which .* -m pip install mpi4py",
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake(job: Job, what: str) -> None:
    outcome = mpiplus(job, "run", "-n", 3, SCRIPTS / "mistaken.py", what)
    assert re.search(MISTAKES[what], outcome.stderr.rstrip().splitlines()[-1]), outcome.output
    outcome.says_not("the last lines of rank")
    if what in ("shapes", "late"):
        outcome.says_not(r"torchmpi_plugin/\w+/\w+\.py", "c10d_logger.py")
