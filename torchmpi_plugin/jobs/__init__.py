"""A job of ranks: started, watched, and how it ended.

The launcher's process listens on a TCP port. mpirun starts a small supervisor per rank (:mod:`.guard`), which
connects, runs the program as its child, and sends what the program prints and how it ends. So it is known which
rank failed first and what it said, however mpirun and the other ranks end after that. Nothing here imports torch.

Uses ``node`` and ``launchers``. Start with ``job.py``, then
``job_monitor.py`` for the launcher's end and ``supervisor.py`` for a rank's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..launchers.mpirun import Launcher, LauncherError, find_launcher
    from .formats import check_format
    from .job import run_job
    from .outcome import JobResult, RankFailure

# Loaded when asked for: the supervisors, of which there may be many on a node, need none of it.
_PUBLIC = {
    "JobResult": "outcome",
    "Launcher": "mpirun",
    "LauncherError": "mpirun",
    "RankFailure": "outcome",
    "check_format": "formats",
    "find_launcher": "mpirun",
    "run_job": "job",
}

__all__ = ["JobResult", "Launcher", "LauncherError", "RankFailure", "check_format", "find_launcher", "run_job"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"torchmpi_plugin.jobs.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'torchmpi_plugin.jobs' has no attribute {name!r}")
