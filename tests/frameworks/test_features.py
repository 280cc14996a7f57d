"""More of the frameworks than one plain run: training goes on from a checkpoint, Ray's own workers.

Each script runs on mpiplus and on gloo, and comes to the same numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from framework_runs import Launchers, Outcome

SCRIPTS = Path(__file__).parent / "scripts"
RESULT = re.compile(r"<(\d) of 2 on (\w+): ([\d. ]+)>")
#: Each script with its arguments, by what is tried.
FEATURES = {
    "transformers: a checkpoint, and on from it": ("trainer_more", "resume"),
    "transformers: fsdp": ("trainer_more", "fsdp"),
    "lightning: ModelParallelStrategy": ("lightning_model_parallel",),
    "megatron-core: tensor parallel groups, and the cross entropy over them": ("megatron_core",),
    "torchrec: embedding tables, one on each rank": ("recommender",),
    "heat: its arrays over all ranks, and DDP between": ("heat_arrays",),
}


def numbers(outcome: Outcome, backend: str) -> list[float]:
    """What rank 0 has come to, where both ranks were on that backend."""
    found = {int(rank): words for rank, where, words in RESULT.findall(outcome.stdout) if where == backend}
    if found.keys() != {0, 1}:
        outcome.problem(f"not both ranks have come to a result on {backend}")
    return [float(word) for word in found[0].split()]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.timeout(600)
def test_feature_as_on_gloo(launchers: Launchers, feature: str) -> None:
    script, *arguments = FEATURES[feature]
    ours = launchers.mpirun(SCRIPTS / f"{script}.py", *arguments, "mpiplus").ended()
    ours.says_not("Traceback", "leaves .* as it is")
    # Its exit code does not count: processes with gloo's threads may end with abort(), without mpiplus too.
    gloo = launchers.torchrun(SCRIPTS / f"{script}.py", *arguments, "gloo")
    assert numbers(ours, "mpiplus") == pytest.approx(numbers(gloo, "gloo"), rel=1e-3)


@pytest.mark.timeout(600)
def test_ray_train(launchers: Launchers) -> None:
    """Its workers have no launcher of MPI's: MPICH makes a world of them, and Open MPI says that it cannot."""
    ours = launchers.alone(SCRIPTS / "ray_train.py", "mpiplus").came_to_an_end()
    if launchers.joins_processes:
        gloo = launchers.alone(SCRIPTS / "ray_train.py", "gloo")
        assert numbers(ours, "mpiplus") == pytest.approx(numbers(gloo, "gloo"), rel=1e-4)
    else:
        ours.says("Ray starts its own workers", "pip install mpich")
        assert ours.code != 0
