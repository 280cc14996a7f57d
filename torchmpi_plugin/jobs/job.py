"""Run a job: from the command line to the report on its end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from ..launchers.command import asks_for_recovery, inherited, launch_command, launch_environment, tells_of_deaths
from ..launchers.layout import lay_out
from ..launchers.mpirun import Launcher, find_launcher
from .failure_report import judge
from .formats import check_format
from .job_monitor import JobMonitor
from .orders import Orders
from .outcome import Ending, JobResult
from .output import Terminal
from .writing import Writer, destination


def run_job(
    command: Sequence[str],
    *,
    nproc: int,
    nnodes: int | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    map_by: str | None = None,
    mpi_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    stdout: str | None = None,
    stderr: str | None = None,
    error_file: str | None = None,
    shown_local_ranks: Sequence[int] | None = None,
    timeout: float | None = None,
    grace: float = 10.0,
    start_timeout: float = 120.0,
    verbose: bool = False,
    prefix: bool = True,
    colour: bool | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
    launcher: Launcher | str | None = None,
    attachment: bytes = b"",
    attempt: int = 0,
    max_restarts: int = 0,
    ended: Callable[[Ending], None] = lambda _: None,
) -> JobResult:
    """Run a program on several ranks through the MPI's own launcher, and watch it to its end.

    What the ranks print goes to ``out`` and ``err``. Nothing else is printed there, but for what mpirun says of its
    own accord where no rank is to blame, and what ``verbose`` adds. In the main thread, SIGTERM, SIGINT, SIGHUP,
    SIGUSR1 and SIGUSR2 are passed on to the ranks while the job runs.

    Args:
        command: the program that each rank runs, and its arguments.
        nproc: how many ranks; with ``nnodes`` how many on each node.
        nnodes: how many nodes.
        hosts: ``h1:2,h2:2`` or ``h1,h2``; None: those of the batch allocation, or this node.
        hostfile: a file with the same.
        map_by: the launcher's own option of this name.
        mpi_args: further options for the launcher.
        env: variables for the ranks, beside this process's.
        stdout: each rank's stdout goes to this file too, with the fields {rank}, {local_rank}, {world_size},
            {node_rank}, {local_world_size} and {attempt}.
        stderr: the same for stderr.
        error_file: where torch's ``@record`` writes a rank's last exception, with the same fields; None: nowhere that
            stays.
        shown_local_ranks: whose output is shown, by their numbers on their nodes; None: all ranks'.
        timeout: seconds after which the job is ended; None: no limit.
        grace: seconds that ranks have between SIGTERM and SIGKILL when the job is ended.
        start_timeout: seconds for all ranks to come up.
        verbose: tell how the job is started.
        prefix: whether to put ``[rank 2]`` in front of the lines of rank 2.
        colour: whether to colour it; None: on a terminal, unless NO_COLOR is set.
        out: where the ranks' stdout goes; None: sys.stdout.
        err: where their stderr goes; None: sys.stderr.
        launcher: a launcher, or its name; None: the one that belongs to the MPI that mpi4py loads.
        attempt: how often the job has been started before, for the ranks to know.
        max_restarts: how often it may be started again.
        ended: is told how it ended, with all that is known.
        attachment: what rank 0's program is to have, wherever it runs; :func:`.rank.attachment` reads it there.

    Returns:
        How it ended. ``message`` says it in words.

    Raises:
        ValueError: arguments that cannot work; nothing was started.
        LauncherError: no launcher that fits; nothing was started.
    """
    if nproc < 1 or (nnodes is not None and nnodes < 1):
        raise ValueError("a job has at least one rank and one node")
    layout = lay_out(nproc, nnodes, hosts, hostfile)
    for format_ in (stdout, stderr):
        if format_:
            check_format(format_, layout.ranks)
    if not isinstance(launcher, Launcher):
        launcher = find_launcher(launcher)
    full = {**os.environ, **(env or {})}
    argv = launch_command(launcher, layout, map_by, mpi_args)
    orders = Orders(
        command=list(command),
        cwd=os.getcwd(),
        stdout=stdout,
        stderr=stderr,
        grace=grace,
        inherited={} if layout.here else inherited(full),
        own={
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            **(env or {}),
        },
        attempt=attempt,
        error_file=error_file,
        shown_local_ranks=shown_local_ranks,
        wants_master=[name for name in ("MASTER_ADDR", "MASTER_PORT") if not full.get(name)],
    )
    writers: dict[object, Writer] = {}
    terminals = [
        Terminal(
            stream,
            prefix,
            _coloured(stream) if colour is None else colour,
            writers.setdefault(destination(stream), Writer()),
            attempt,
        )
        for stream in (out or sys.stdout, err or sys.stderr)
    ]
    recovers, tells = asks_for_recovery(mpi_args), tells_of_deaths(mpi_args)
    monitor = JobMonitor(layout, orders, terminals, timeout, start_timeout, recovers, attachment, tells)
    if verbose:
        print(f"mpiplus run: {launcher.version} ({launcher.path})", *_shown(argv), sep="\n    ", file=err or sys.stderr)
    monitor.run(argv, launch_environment(launcher, layout, full))
    ended(monitor.ended())
    return judge(monitor.ended(), Path(launcher.path).name, verbose)


def _coloured(stream: TextIO) -> bool:
    with contextlib.suppress(ValueError, AttributeError):
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return False


def _shown(argv: Sequence[str]) -> list[str]:
    import shlex

    return [shlex.join(argv)]
