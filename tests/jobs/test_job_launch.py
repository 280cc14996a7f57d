"""launch_subprocesses: from a plain process it starts the ranks, under mpirun it is in place."""

from __future__ import annotations

import fork_server
import pytest
from job_runs import SCRIPTS, Job, free_port, run_process

SCRIPT = "launches.py"
#: Everything in it is of __main__, and the ranks send it on.
PROGRAM = f"""
import sys
sys.path.append({str(SCRIPTS)!r})
import forked_ranks
from dataclasses import dataclass

import torch.distributed as dist
from torchmpi_plugin.dist import all_gather_object, compute_and_broadcast
from torchmpi_plugin.launch import MultiprocessConfig, RankFailedError, launch_subprocesses

@dataclass
class Sample:
    number: int

    def doubled(self):
        return Sample(2 * self.number)

def double(sample):
    return sample.doubled()

def train(samples, arguments):
    assert all_gather_object(double(Sample(dist.get_rank()))) == samples
    function, kind = all_gather_object((double, Sample))[0]
    assert function(kind(4)) == Sample(8)
    assert sys.argv[1:] == arguments, sys.argv

def fail():
    dist.barrier()
    compute_and_broadcast(lambda: 1 // 0, rank=1)

if __name__ == "__main__":
    config = MultiprocessConfig(world_size=2)
    launch_subprocesses(train, config, None, 0, [Sample(0), Sample(2)], sys.argv[1:])
    for _ in range(3):
        try:
            launch_subprocesses(fail, config)
        except RankFailedError as error:
            assert (error.rank, error.exit_code) == (1, 1), error
            assert "ZeroDivisionError" in error.traceback
            print("as expected", flush=True)
"""


def test_four_ranks_from_a_plain_process(job: Job) -> None:
    outcome = job.alone(SCRIPT, "from_a_plain_process").succeeded(4)
    assert outcome.stdout.count("] again\n") == 4


@pytest.mark.parametrize("scenario", [pytest.param("on_gloo_over_tcp", marks=pytest.mark.every_change), "alone"])
def test_two_ranks(job: Job, scenario: str) -> None:
    job.alone(SCRIPT, scenario, *([free_port()] if scenario == "on_gloo_over_tcp" else [])).succeeded(2)


@pytest.mark.parametrize("how", ["script", "-c", "stdin"])
def test_what_main_has_and_who_is_to_blame(job: Job, how: str) -> None:
    """Classes of __main__ can be sent on; who raised is named, and not who was told of it and was faster."""
    script = job.directory / "scripts" / "program.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    if how == "script":  # from whose path the working directory is missing
        (job.directory / "json.py").write_text("raise RuntimeError('of the working directory')")
    python = fork_server.python()
    command = {
        "script": f"{python} {script} --lr 0.1",
        "-c": f'{python} -c "$(cat {script})" --lr 0.1',
        "stdin": f"{python} - --lr 0.1 < {script}",
    }[how]
    outcome = run_process(["sh", "-c", command], job.installation.full_environment(), job.directory).ended()
    assert outcome.stdout.count("as expected") == 3


@pytest.mark.parametrize(("who", "how", "code"), [(0, "raise", 1), (2, "exit", 7), (1, "kill", 137)])
def test_a_rank_that_fails(job: Job, who: int, how: str, code: int) -> None:
    job.alone(SCRIPT, "one_fails", who, how, code).ended().says("parent end").says_not("came out")


def test_ctrl_c_ends_all(job: Job) -> None:
    job.alone(SCRIPT, "interrupted", job.directory).ended().says("parent end")
