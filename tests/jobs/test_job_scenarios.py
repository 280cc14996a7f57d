"""Jobs that come to their end on every rank: what each shows is said where it is, in scripts/."""

from __future__ import annotations

import pytest
from job_runs import Job

from torchmpi_plugin.torch_internals import has_python_backends

#: Script, ranks, scenarios (with + between those of one process), and their arguments.
SCENARIOS = """
    beside_mpi4py 2 initialised_before
    beside_mpi4py 2 thread_level single
    beside_mpi4py 2 thread_level funneled
    beside_mpi4py 2 thread_level serialized
    beside_mpi4py 4 own_communicators
    creation 3 fails
    creation 3 goes_without
    deadlines 3 absent_member .
    diagnosis 3 detail
    diagnosis 3 elsewhere
    exits 2 exit_caught stays
    exits 2 exit_caught leaves
    exits 2 exit_caught leaves mpi4py's except
    exits 2 exit_caught leaves mpi4py's thread
    exits 3 destroyed_meanwhile
    exits 2 leave destroyed
    exits 2 leave kept
    exits 2 leave dropped
    exits 2 leave pending
    launches 1 in_place 1
    launches 2 of_another_size
    launches 3 in_place 3
    launches 4 factorisations
    rendezvous 2 refused
    rendezvous 4 reused_numbers
    rendezvous 4 finalised_by_the_program
    variables 2 rank_of_a_batch_script+backend_by_default+timeouts
    variables 2 through_torchcomms
    variables 2 wrong_settings .
    variables 2 wrong_torch_variables
    variables 3 same_rank .
"""
#: Of torch 2.15.
NEWER = """
    api_modes 2 shared cpu:mpiplus,cuda:fake cpu
    api_modes 2 shared cuda:fake,cpu:mpiplus cpu
    api_modes 2 shared cpu:gloo,cuda:mpiplus cuda
    api_modes 3 chosen
    api_modes 2 a_device cpu
    api_modes 3 split direct
    api_modes 3 split dispatcher
    api_modes 3 hooks direct
    api_modes 3 hooks dispatcher
    api_modes 3 gathered
"""
#: In which the MPIs differ.
UNDER_EACH = """
    edges 2 refused
    edges 2 finalized
    progressing 2 each
"""


def parsed(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line]


def check(job: Job, words: list[str]) -> None:
    script, ranks, *more = words
    job.run(int(ranks), f"{script}.py", *more).succeeded(int(ranks))


@pytest.mark.parametrize("words", parsed(SCENARIOS + NEWER * has_python_backends()), ids=" ".join)
def test_scenario(job: Job, words: list[str]) -> None:
    check(job, words)


@pytest.mark.every_change
def test_mistakes_are_told(job: Job) -> None:
    check(job, ["rendezvous", "2", "mistakes", "."])


@pytest.mark.under_each
@pytest.mark.parametrize("words", parsed(UNDER_EACH), ids=" ".join)
def test_scenario_under_each(job: Job, words: list[str]) -> None:
    check(job, words)


def test_mpi_that_we_started_is_finalised(job: Job) -> None:
    """The program's own MPI_Finalize comes after ours, and MPI says that it is the second one."""
    outcome = job.run(2, "beside_mpi4py.py", "initialised_by_us")
    outcome.failed(r"\[0\] end", r"\[1\] end", "(?i)after MPI_Finalize was invoked|after finalizing")


@pytest.mark.fresh("Python starts MPI as the first thing in its life")
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_less_than_mpi_thread_multiple(job: Job, level: str) -> None:
    """The program has chosen it."""
    outcome = job.run(2, "thread_levels.py", level)
    if "provides more than it is asked for" in outcome.output:
        pytest.skip("this MPI provides MPI_THREAD_MULTIPLE all the same")
    outcome.succeeded(2)
