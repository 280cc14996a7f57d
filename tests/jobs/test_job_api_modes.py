"""Both API modes, whole jobs: what torch 2.15 asks of a group, and what an older torch is told."""

from __future__ import annotations

import subprocess
import sys

import pytest
from job_runs import Job

from torchmpi_plugin import torch_internals

newer = pytest.mark.skipif(not torch_internals.has_python_backends(), reason="needs torch 2.15")


@newer
@pytest.mark.parametrize("backends", ["cpu:mpiplus,cuda:fake", "cuda:fake,cpu:mpiplus"])
def test_shared_in_detail(job: Job, backends: str) -> None:
    variables = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    job.run(2, "api_modes.py", "shared", backends, "cpu", environment=variables).succeeded(2)


@newer
def test_check_for_nan(job: Job) -> None:
    job.run(2, "api_modes.py", "not_a_number", environment={"TORCH_DIST_NAN_CHECK": "1"}).succeeded(2)


def test_abort_hooks_and_more_time(job: Job) -> None:
    job.run(2, "api_modes.py", "abort_hooks+more_time").succeeded(2)


def test_flight_recorder(job: Job) -> None:
    """The traces of a job that timed out, as torch's own analyzer reads them."""
    newer_torch = torch_internals.has_python_backends()
    variables = {"TORCH_FR_DUMP_TEMP_FILE": f"{job.directory}/trace_", "TORCH_FR_DUMP_ON_TIMEOUT": "1"}
    dumps = "dumps" if newer_torch else "no"
    job.run(3, "api_modes.py", "recorded", job.directory, dumps, environment=variables).succeeded(3)
    if not newer_torch:
        return  # its analyzer knows nccl and gloo only
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    analysis = subprocess.run(
        [*analyzer, str(job.directory), "-p", "trace_"], check=False, capture_output=True, text=True, timeout=100
    )
    told = analysis.stdout + analysis.stderr
    assert "missing ranks: {1}" in told, told
    assert "mpiplus:all_reduce" in told, told
