"""The scripts with which Accelerate tests itself, which are in its wheel: on mpiplus under mpirun as on gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from framework_runs import Launchers, Outcome

RUN_ONE, RUN_EACH = (Path(__file__).parent / "scripts" / f"accelerates_{name}.py" for name in ("own", "each"))
#: Those that two ranks without a GPU can run to the end.
ACCELERATES_OWN = ("test_script", "test_ops", "test_sync")
#: Those of which only some tests can. Accelerate joins uneven inputs on GPUs only, as some of the first want; torch
#: lets hooks of bfloat16, which the second has besides others, go with NCCL only.
ACCELERATES_IN_PART = ("test_distributed_data_loop", "test_ddp_comm_hook")
EACH = re.compile(r"<(\d) of 2: (\w+): (.*)>")


def check_both_ends(outcome: Outcome, script: str, backend: str) -> None:
    for rank in range(2):
        outcome.says(f"<{rank} of 2 came to the end of {script} on {backend}>")


@pytest.mark.parametrize("script", ACCELERATES_OWN)
@pytest.mark.timeout(600)
def test_accelerates_own(launchers: Launchers, script: str) -> None:
    ours = launchers.mpirun(RUN_ONE, script, "mpiplus").came_to_an_end().says_not("leaves .* as it is")
    if ours.code != 0:
        ours.problem("the script failed")
    check_both_ends(ours, script, "mpiplus")
    # Its exit code does not count: processes with gloo's threads may end with abort(), without mpiplus too.
    check_both_ends(launchers.torchrun(RUN_ONE, script, "gloo"), script, "gloo")


def passed(outcome: Outcome) -> set[str]:
    """The tests that both ranks pass."""
    found = [(rank, test) for rank, test, result in EACH.findall(outcome.stdout) if result == "passed"]
    return {test for rank, test in found if rank == "0" and ("1", test) in found}


@pytest.mark.parametrize("script", ACCELERATES_IN_PART)
@pytest.mark.timeout(600)
def test_accelerates_in_part(launchers: Launchers, script: str) -> None:
    """What passes on gloo passes on mpiplus; what neither can do is Accelerate's or torch's own limit."""
    ours = launchers.mpirun(RUN_EACH, script, "mpiplus").came_to_an_end().says_not("leaves .* as it is")
    gloo = passed(launchers.torchrun(RUN_EACH, script, "gloo"))
    if not gloo or gloo - passed(ours):
        ours.problem(f"of {len(gloo)} that pass on gloo these do not: {sorted(gloo - passed(ours))}")
