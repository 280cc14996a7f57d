"""Files of ranks on nodes that share no directory with this one, where the job has not collected them."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from ...jobs.job import run_job
from ...jobs.spec import JobSpec
from ...node.python import python_command
from ...timeline import files, rows

_SECONDS = 60.0
_TELL = "from torchmpi_plugin.timeline.files import tell; tell()"


def fetch(spec: JobSpec, directory: Path) -> None:
    """Get what is on the job's nodes and not here, and remove it there: by processes started as the ranks were."""
    jobs = rows.jobs_in(directory)
    is_whole = bool(jobs) and len(list(jobs.values())[-1]) == spec.layout.ranks
    if spec.layout.one_node or (is_whole and not spec.max_restarts):
        return
    known = [path.name for paths in jobs.values() for path in paths]
    with tempfile.TemporaryFile("w+") as said, open(os.devnull, "w") as nowhere:
        plain = JobSpec(python_command(_TELL, str(directory), *known), spec.nproc, out=said, err=nowhere, prefix=False)
        same = ("nnodes", "hosts", "hostfile", "map_by", "mpi_args", "launcher")
        run_job(replace(plain, timeout=_SECONDS, **{name: getattr(spec, name) for name in same}))
        said.seek(0)
        files.hear(said, directory)
