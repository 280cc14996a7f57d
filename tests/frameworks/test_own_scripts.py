"""The scripts with which Accelerate tests itself, which are in its wheel: on mpiplus under mpirun as on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import Launchers, Outcome

RUN_ONE = Path(__file__).parent / "scripts" / "accelerates_own.py"
#: Those that two ranks without a GPU can run to the end.
ACCELERATES_OWN = ("test_script", "test_ops", "test_sync")


def check_both_ends(outcome: Outcome, script: str, backend: str) -> None:
    for rank in range(2):
        outcome.says(f"<{rank} of 2 came to the end of {script} on {backend}>")


@pytest.mark.parametrize("script", ACCELERATES_OWN)
@pytest.mark.timeout(600)
def test_accelerates_own(launchers: Launchers, script: str) -> None:
    ours = launchers.mpirun(RUN_ONE, script, "mpiplus").ended().says_not("leaves .* as it is")
    check_both_ends(ours, script, "mpiplus")
    # Its exit code does not count: processes with gloo's threads may end with abort(), without mpiplus too.
    check_both_ends(launchers.torchrun(RUN_ONE, script, "gloo"), script, "gloo")
