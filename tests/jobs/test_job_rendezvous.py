"""How ranks find each other, and what is said when they cannot."""

from __future__ import annotations

import re

import pytest
from job_runs import Job, free_port

NO_PLUGIN = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_every_way(job: Job) -> None:
    job.run(3, "rendezvous.py", "every_way", free_port(), free_port()).succeeded(3)


def test_variables_that_the_user_set(job: Job) -> None:
    job.run(3, "rendezvous.py", "environment_given", free_port()).succeeded(3)


@pytest.mark.fresh("a process that nothing has prepared")
def test_plain_python_is_a_world_of_one(job: Job) -> None:
    job.alone("rendezvous.py", "one_process").succeeded(1)


@pytest.mark.fresh("the import of torch, with the plugin and without")
def test_gloo_keeps_torchs_own_error(job: Job) -> None:
    with_plugin = job.alone("rendezvous.py", "other_backends").succeeded(1)
    without = job.alone("rendezvous.py", "other_backends", environment=NO_PLUGIN).succeeded(1)
    errors = [re.findall("gloo says: .*", outcome.stdout) for outcome in (with_plugin, without)]
    assert errors[0] == errors[1]
    assert "RANK" in errors[0][0]


def test_beside_other_backends_under_mpiexec(job: Job) -> None:
    job.run(2, "rendezvous.py", "mixed").succeeded(2).says("gloo says: .*RANK")
