"""Child processes: what they may not do says so, and the parents go on and end in order."""

from __future__ import annotations

import re

import pytest
from job_runs import Job

from torchmpi_plugin.torch_internals import has_python_backends


@pytest.mark.fresh("children of a process that was not forked itself")
@pytest.mark.parametrize("api_mode", ["direct", "dispatcher"])
def test_everything_that_a_child_inherits(job: Job, api_mode: str) -> None:
    """What needs MPI or another process is refused there, by each object; the parents' messages come."""
    if api_mode == "dispatcher" and not has_python_backends():
        pytest.skip("this torch has the direct mode only")
    outcome = job.run(2, "forked_objects.py", "inherited", api_mode).succeeded(2).says_not("child: ")
    refused = re.findall(r"\] (\w+): (\d+) methods are refused", outcome.stdout)
    for kind, least in (("group", 20), ("Work", 4), ("helpers", 6)):
        assert max(int(count) for name, count in refused if name == kind) >= least, refused


@pytest.mark.slow
@pytest.mark.fresh("children of a process that was not forked itself")
def test_worker_processes(job: Job) -> None:
    outcome = job.run(2, "forks.py", "worker_processes").succeeded(2)
    for method in ("fork", "spawn", "forkserver"):
        outcome.says(rf"\] {method} works", f"DataLoader works with {method}")


OWN_WORLD = """
import os, sys, torch.distributed as dist
dist.init_process_group("mpiplus")
if not (child := os.fork()):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
dist.barrier()
os.write(1, b"[%d] end\\n" % dist.get_rank())  # in one piece, whatever the other writes
"""


@pytest.mark.fresh("children of a process that was not forked itself")
def test_a_child_with_a_world_of_its_own(job: Job) -> None:
    """Of another backend; it ends in order, though it has the server of its parent's store."""
    job.start(job.installation.command(2, ["-c", OWN_WORLD]), None).succeeded(2)


MPI_BEFORE = """
import os, torch.distributed as dist
from mpi4py import MPI
if not (child := os.fork()):
    try:
        dist.init_process_group("mpiplus")
    except RuntimeError as error:
        os._exit(7 if "forked from an MPI rank" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
dist.init_process_group("mpiplus")
os.write(1, b"[%d] end\\n" % dist.get_rank())  # in one piece, whatever the other writes
"""


@pytest.mark.fresh("children of a process that was not forked itself")
def test_a_child_of_a_rank_that_has_only_mpi(job: Job) -> None:
    """It is no rank either, though nothing of mpiplus was there when it was forked."""
    job.start(job.installation.command(2, ["-c", MPI_BEFORE]), None).succeeded(2)


@pytest.mark.fresh("children of a process that was not forked itself")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_come_to_init(job: Job, method: str) -> None:
    """MPI must not start in them: it would take them for the rank, and break that one."""
    outcome = job.run(2, "unguarded.py", method)
    outcome.failed("is a rank of a job, and is no rank itself", "__main__", "worker.* exited unexpectedly")
    outcome.says_not("Segmentation", "Process received signal")
