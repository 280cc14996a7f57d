"""The documentation's script for each framework: on mpiplus under mpirun it learns what it learns on gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from framework_runs import Launchers, Outcome

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "frameworks"
#: Each script, perhaps with arguments, and what it is a script for: a distribution, or "torch".
SCRIPTS = {
    "accelerate_train": "accelerate",
    "transformers_trainer": "transformers",
    "lightning_trainer": "lightning",
    "lightning_fabric": "lightning",
    "deepspeed_zero": "deepspeed",
    "deepspeed_zero 0 discover": "deepspeed",
    "deepspeed_zero 1": "deepspeed",
    "deepspeed_zero 3": "deepspeed",
    "ignite_train": "pytorch-ignite",
    "torchmetrics_accuracy": "torchmetrics",
    "fsdp2_checkpoint": "torch",
    "tensor_parallel": "torch",
    "pipeline_1f1b": "torch",
    "compile_ddp": "torch",
    "ddp_tutorial": "torch",
}
RESULT = re.compile(r" on (\w+), 2 ranks: loss ([\d.]+) to ([\d.]+)(.*)")


def result(outcome: Outcome, backend: str) -> tuple[float, float, str]:
    """The losses that one rank has printed, and what follows on that line."""
    found = RESULT.findall(outcome.stdout)
    if len(found) != 1 or found[0][0] != backend:
        outcome.problem(f"no result on {backend}, or several")
    return float(found[0][1]), float(found[0][2]), found[0][3]


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {script.split()[0] for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.timeout(600)
def test_as_on_gloo(launchers: Launchers, script: str) -> None:
    name, *arguments = script.split()
    path = EXAMPLES / f"{name}.py"
    ours = launchers.mpirun(path, *(["mpiplus", *arguments] if arguments else []))
    ours.ended().says_not("Traceback", "leaves .* as it is")
    first, last, rest = result(ours, "mpiplus")
    assert last < first, "it learns nothing"
    # Its exit code does not count: processes with gloo's threads may end with abort(), without mpiplus too.
    gloo = result(launchers.torchrun(path, "gloo", *arguments), "gloo")
    assert (first, last, rest) == (pytest.approx(gloo[0], rel=1e-4), pytest.approx(gloo[1], rel=1e-3), gloo[2])
