"""Arguments, variables and calls of MPI at the edge of what can be."""

from __future__ import annotations

import pytest
from job_runs import Job

pytestmark = pytest.mark.under_each


@pytest.mark.parametrize("what", ["refused", "finalized"])
def test_an_edge(job: Job, what: str) -> None:
    job.run(2, "edges.py", what).succeeded(2)
