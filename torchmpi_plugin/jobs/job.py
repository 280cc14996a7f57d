"""Run a job: from its description to the report on its end."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TextIO

from ..launchers.command import launch_command, launch_environment
from ..launchers.mpirun import Launcher, find_launcher
from .failure_report import result_of
from .job_monitor import JobMonitor
from .loop import run
from .outcome import JobResult
from .output import Terminal, Writer, destination
from .spec import JobSpec


def run_job(spec: JobSpec) -> JobResult:
    """Run a program on several ranks through the MPI's own launcher, and watch it to its end.

    What the ranks print goes to ``out`` and ``err``. Nothing else is printed there, but for what mpirun says of its
    own accord where no rank is to blame, and what ``verbose`` adds. In the main thread, SIGTERM, SIGINT, SIGHUP,
    SIGUSR1 and SIGUSR2 are passed on to the ranks while the job runs.

    Raises:
        ValueError: a description that cannot work; nothing was started.
        LauncherError: no launcher that fits; nothing was started.
    """
    layout = spec.layout
    launcher = spec.launcher if isinstance(spec.launcher, Launcher) else find_launcher(spec.launcher)
    argv = launch_command(launcher, layout, spec.map_by, spec.mpi_args)
    if spec.verbose:
        how = f"mpiplus run: {launcher.version} ({launcher.path})\n    {shlex.join(argv)}"
        print(how, file=spec.err or sys.stderr)
    monitor = JobMonitor(spec, _terminals(spec))
    run(monitor.run(argv, launch_environment(launcher, layout, spec.environment())))
    return result_of(monitor.ending, Path(launcher.path).name, spec.verbose)


def _terminals(spec: JobSpec) -> list[Terminal]:
    """For stdout and stderr."""
    writers: dict[object, Writer] = {}
    terminals = []
    for stream in (spec.out or sys.stdout, spec.err or sys.stderr):
        writer = writers.setdefault(destination(stream), Writer())
        colour = _is_coloured(stream) if spec.colour is None else spec.colour
        terminals.append(Terminal(stream, spec.prefix, colour, writer, spec.attempt))
    return terminals


def _is_coloured(stream: TextIO) -> bool:
    with contextlib.suppress(ValueError, AttributeError):
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return False
